"""One evaluation without training: only engines, which serve a model or the export of a checkpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from skyrl_train.checks.training import MODEL
from skyrl_train.cluster.launch import EngineProcesses, launch_engines
from skyrl_train.config import Config
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.export_hf import find_checkpoint
from skyrl_train.entrypoints.run import connect
from skyrl_train.forecast.fit import fitted_for_evaluation
from skyrl_train.hf.checkpoint import export_sum
from skyrl_train.hf.download import download, python_path
from skyrl_train.hf.hub import local_folder, name_and_revision, seen_from_anywhere
from skyrl_train.rollout.seeds import seed
from skyrl_train.tracking.progress import ConsoleProgress
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.tracking.sinks import build_tracker
from skyrl_train.trainer.build import max_model_len
from skyrl_train.trainer.run_state import Checkpoint, load_checkpoint
from skyrl_train.types import Group, Metrics, Prompt

log = logging.getLogger(__name__)
END_S = 10.0
"""Seconds in which a cancelled export may end its processes before they are killed."""


class Generation(Experiment):
    """Samples responses to data.val_data and scores them. Users replace its parts by overriding `get_*`."""

    is_done = False

    def __init__(self, config: Config, console: Console) -> None:
        """Raises: ValueError for a bad row, an unknown environment, a model or a checkpoint that cannot be used."""
        self.evaluated = chosen_checkpoint(config)
        path = config.trainer.policy.model.path
        if self.evaluated is not None:  # the model that its run began with has the same shape and tokenizer
            self.check_named_model(path, self.evaluated)
            path = self.evaluated.state.model["path"]
            trained, here = (str(value).lower() for value in (self.evaluated.state.model["bf16"], config.trainer.bf16))
            if trained != here:
                log.warning(
                    "trainer.bf16 is %s, and was %s in the run of %s, whose own evaluations used engines of that "
                    "dtype: scores may differ from theirs. For the same, set trainer.bf16=%s",
                    here, trained, self.evaluated.folder, trained,
                )  # fmt: skip
        super().__init__(with_model(config, path), console)

    def check_named_model(self, path: str, evaluated: Checkpoint) -> None:
        """None: an experiment names a model even where a run began with another."""

    def load_model(self) -> tuple[str, PretrainedConfig]:
        """No check against Megatron: any model that the engines can serve."""
        trainer = self.config.trainer
        download(MODEL, trainer.policy.model.path, trainer.download_timeout_s)
        folder = local_folder(trainer.policy.model.path)
        return folder, AutoConfig.from_pretrained(folder, trust_remote_code=trainer.trust_remote_code)

    def check_models(self) -> None:
        """None: an evaluation has no reference model."""

    def fit_to_device(self, kind: DeviceKind) -> None:
        """Choose open keys of the engines."""
        self.config = fitted_for_evaluation(self.config, self.model_config, kind, self._explain)

    def get_train_prompts(self) -> list[Prompt]:
        return []

    def get_hints(self) -> None:
        """Empty: an evaluation has no teachers."""

    def find_checkpoint(self) -> bool:
        """Nothing resumes. Raises: ValueError if the folder, which would be renamed, is that of a training run."""
        run_dir = Path(self.config.trainer.run_dir).expanduser().resolve()
        is_above = self.evaluated is not None and self.evaluated.folder.is_relative_to(run_dir)
        if is_above or any((run_dir / name).exists() for name in ("checkpoints", "exports")):
            raise ValueError(
                f"trainer.run_dir is {run_dir}: it holds checkpoints or exports of a training run. Choose another "
                "folder for the evaluation"
            )
        return False

    def request_stop(self) -> bool:
        """An evaluation has no steps to finish."""
        return False

    async def run(self, run_dir: RunDir) -> None:
        """Start the engines, evaluate, and always stop them."""
        folder = await self._served_folder(run_dir)
        config = with_model(self.config, folder)
        checkpoint = "" if self.evaluated is None else f" (checkpoint {self.evaluated.folder})"
        n_samples = config.generator.eval_n_samples_per_prompt
        lines = (
            f"run     {config.trainer.run_name} in {run_dir}",
            f"model   {config.trainer.policy.model.path}{checkpoint}",
            f"data    {len(self.val_prompts)} prompts x {n_samples} samples of {', '.join(config.data.val_data)}",
        )
        self._console.print("\n".join(lines), highlight=False, soft_wrap=True)
        with connect() as cluster:
            await self.fit_to_cluster(cluster)
            config = with_model(self.config, folder)
            longest = max_model_len(config, self.model_config)
            engines = await launch_engines(config, cluster, max_model_len=longest, logs=str(run_dir.logs))
            try:
                self._say("engines are up")
                await self._evaluate(run_dir, engines)
            finally:
                await asyncio.shield(engines.stop())

    async def _evaluate(self, run_dir: RunDir, processes: EngineProcesses) -> None:
        config = self.config
        step = 0 if self.evaluated is None else self.evaluated.state.global_step
        loggers = tuple(name for name in config.trainer.logger if name != "console")
        with ExitStack() as at_end:
            quiet = replace(config, trainer=replace(config.trainer, logger=loggers))
            tracker = build_tracker(quiet, run_dir.path)
            at_end.callback(tracker.close)
            rollout = self.get_rollout(self.get_env_pool(at_end))
            samples = self.get_samples(run_dir, tracker, at_end)
            # There is no source here that would watch the rollouts.
            collector = self._watched(self.get_collector(processes.engines.generate, rollout))
            evaluation = self.get_evaluation(collector, samples)
            progress = ConsoleProgress(self._console, "evaluate")
            sampled = await evaluation.sample(seed("eval", config.trainer.seed, step), progress)
            metrics = evaluation.metrics(sampled)
            tracker.log(step, metrics)
            files = samples.evaluation(step, sampled.groups, parquet=True)
        self._console.print(result_table(sampled.groups, metrics))
        self._console.print("\n".join(f"samples {file}" for file in files), highlight=False, soft_wrap=True)

    async def _served_folder(self, run_dir: RunDir) -> str:
        """Folder of the model: the configured one, the run's own export of the checkpoint, or a new export."""
        if self.evaluated is None:
            return self.config.trainer.policy.model.path
        folder = self.evaluated.folder
        own = folder.parent.parent / "exports" / folder.name
        if (written := export_sum(own)) and written == self.evaluated.state.export:
            return str(own)
        target = run_dir.path / "model"
        self._say(f"exporting {folder}")
        command = ("-m", "skyrl_train.entrypoints.export_hf", f"checkpoint={folder}", f"export_path={target}")
        pipe = asyncio.subprocess.PIPE
        # In its own session, so that its ranks can be ended with it.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdout=pipe,
            stderr=pipe,
            env=os.environ | {"PYTHONPATH": python_path()},
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            printed = (output + errors).decode(errors="replace").strip()
            raise RuntimeError(f"the checkpoint {folder} could not be exported: {printed}")
        return str(target)


class NamedGeneration(Generation):
    """For a command line that names the model."""

    def check_named_model(self, path: str, evaluated: Checkpoint) -> None:
        """Raises: ValueError if the checkpoint is of another model."""
        own, named = evaluated.state.model["path"], seen_from_anywhere(path)
        if own not in (named, path) and name_and_revision(own)[0] != path:
            raise ValueError(
                f"{MODEL} is {path} and trainer.resume_mode is set: the run of {evaluated.folder} began with {own}, "
                "and the checkpoint would be evaluated. Set trainer.resume_mode=null to evaluate "
                f"{path}, or remove {MODEL}"
            )


def chosen_checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint of trainer.resume_mode; None to evaluate trainer.policy.model.path. Raises: ValueError."""
    trainer = config.trainer
    if trainer.resume_mode is None:
        return None
    if trainer.resume_mode == "latest":
        return find_checkpoint(trainer.ckpt_path, "trainer.ckpt_path")
    assert trainer.resume_path is not None, "checks/training.py asks for it"
    return load_checkpoint(Path(trainer.resume_path).expanduser().resolve())


def with_model(config: Config, path: str) -> Config:
    """The configuration of engines that serve the folder unchanged, on dedicated devices."""
    trainer = config.trainer
    model = replace(trainer.policy.model, path=path, lora=replace(trainer.policy.model.lora, rank=0, path=None))
    policy, placement = replace(trainer.policy, model=model), replace(trainer.placement, colocate_all=False)
    trainer = replace(trainer, policy=policy, placement=placement, verify_sync_every=0)
    return replace(config, trainer=trainer)


def result_table(groups: list[Group], metrics: Metrics) -> Table:
    """Scores of all prompts and of each data source, with their standard errors."""
    names = list(dict.fromkeys(name.split("/")[1] for name in metrics))
    names = names[:1] if len(names) == 2 else names  # a single data source is all of them
    scores = [name.removeprefix("eval/all/") for name in metrics if name.startswith("eval/all/")]
    shown = [name for name in scores if name.startswith(("avg_score", "pass_at_")) and not name.endswith("_stderr")]
    table = Table("data", *(name.replace("_at_", "@").replace("avg_", "") for name in shown))
    for name in names:
        cells = []
        for score in shown:
            value, error = metrics.get(f"eval/{name}/{score}"), metrics.get(f"eval/{name}/{score}_stderr")
            cells.append("" if value is None else f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
        table.add_row(name, *cells)
    num_samples = sum(len(group.rewards) for group in groups)
    failed = int(metrics.get("eval/all/num_failed_rollouts", 0))
    without = f" ({failed} more failed)" if failed else ""
    table.caption = f"{num_samples} samples of {len(groups)} prompts{without}; ± one standard error over the prompts"
    return table
