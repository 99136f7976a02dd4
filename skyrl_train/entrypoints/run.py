"""One run of any program that trains, from a checked configuration to its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from skyrl_train.checks.model_folder import check_transformer_config, checked_folder, require_models_outside
from skyrl_train.checks.tokenizer import check_tokenizer, load_tokenizer
from skyrl_train.checks.training import MODEL
from skyrl_train.checks.training import POLICY as POLICY_LAYOUT
from skyrl_train.cluster.demands import POLICY
from skyrl_train.cluster.downloads import require_shared
from skyrl_train.cluster.gpu_kind import cluster_gpu_kind, local_gpu_kind
from skyrl_train.cluster.launch import PolicyProcesses, Processes
from skyrl_train.cluster.session import Cluster, connect
from skyrl_train.config.policy import Layout
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.entrypoints.resume import (
    chosen_checkpoint,
    identities,
    lock_checkpoints,
    require_export_folder,
    resumes_in_its_folder,
    with_missing_export,
)
from skyrl_train.faults import require_returns
from skyrl_train.forecast.fit import fitted
from skyrl_train.hf import adapter_file
from skyrl_train.ranks import SavedState
from skyrl_train.tracking.run_dir import RECORD, HeldFolder, RunDir
from skyrl_train.tracking.sinks import Tracker, build_tracker
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.run_state import Checkpoint

log = logging.getLogger(__name__)
WORKING_COPIES = "working_dir_files"
"""Folder in which Ray unpacks the working folders of submitted jobs."""


C = TypeVar("C", bound=RunConfig)
P = TypeVar("P", Processes, PolicyProcesses)


class Run(ABC, Generic[C, P]):
    """Starts processes, trains and stops them. Users replace parts by overriding `get_*`."""

    started_line: str
    """Console line when all processes are up."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        require_returns(cls)

    def __init__(self, config: C, console: Console) -> None:
        """Raises: ValueError for a model that cannot be loaded or would not be computed as in Hugging Face, for
        weights or a tokenizer that are missing or do not match, or for an adapter of another model.
        """
        self.config, self._console = config, console
        self._started = time.perf_counter()
        self.model_folder, self.model_config = self.load_model()
        self.tokenizer = self.get_tokenizer()
        vocab_size = self.model_config.get_text_config().vocab_size
        check_tokenizer(self.tokenizer, vocab_size, config.trainer.policy.model.path)
        self.check_models()
        self._local_kind = local_gpu_kind()
        if self._local_kind is not None:
            self.fit_to_device(self._local_kind)
        self.base: dict[str, Any] = {}
        """Identity of the model and of a reference, for checkpoints."""
        self.checkpoint: Checkpoint | None = None
        self._checkpoint_lock: TextIO | None = None
        """Held until `close`."""
        self.loop: Loop | None = None
        """None until all processes are up."""

    @property
    @abstractmethod
    def num_train_rows(self) -> int:
        """Rows of the training data that are not dropped."""

    @abstractmethod
    async def launch(self, cluster: Cluster, logs: str) -> P:
        """Start the processes."""

    @abstractmethod
    def build_loop(self, processes: P, run_dir: RunDir, tracker: Tracker, at_end: ExitStack) -> Loop:
        """The loop with its parts; those that must be closed are added to `at_end`."""

    @abstractmethod
    def introduction(self, layout: str) -> dict[str, str]:
        """Label -> line about model, data and steps, for the head of the console."""

    def load_model(self) -> tuple[str, PretrainedConfig]:
        """Folder and configuration of the model. Raises: ValueError like the constructor."""
        policy = self.config.trainer.policy
        folder, config = checked_folder(MODEL, policy.model.path, self.config.trainer.download_timeout_s)
        check_transformer_config(policy.megatron_config, POLICY_LAYOUT, folder)
        adapter_file.check(folder, policy.model.lora)
        return folder, config

    def check_models(self) -> None:
        """Download and check models besides the policy's, whose sizes the forecast reads; there are none."""

    def fit_to_device(self, kind: DeviceKind) -> None:
        """Choose open keys of the configuration for GPUs of this kind, and print the forecast.
        Raises: ValueError if the run cannot fit them.
        """
        self.config = fitted(self.config, self.model_config, kind, self._explain)

    async def fit_to_cluster(self, cluster: Cluster) -> None:
        """Like `fit_to_device`, for GPUs of a cluster that the run has joined."""
        if cluster.has_gpus and self._local_kind is None and (kind := await cluster_gpu_kind()) is not None:
            self.fit_to_device(kind)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model_folder, MODEL, self.config.trainer.trust_remote_code)

    def get_tracker(self, run_dir: RunDir, num_steps: int) -> Tracker:
        steps_done = 0 if self.checkpoint is None else self.checkpoint.state.global_step
        return build_tracker(self.config, run_dir.path, total_steps=num_steps, steps_done=steps_done)

    def find_checkpoint(self) -> bool:
        """Find the checkpoint of `trainer.resume_mode`; return whether the run resumes in its folder.

        Raises: ValueError for a checkpoint that cannot be resumed from, or one of another run.
        """
        self._checkpoint_lock = lock_checkpoints(self.config.trainer)
        trainer = self.config.trainer
        require_export_folder(trainer, self.num_steps)
        self.base = identities(trainer, self.model_folder)
        chosen = chosen_checkpoint(trainer, self.num_train_rows, self.model_folder)
        self.checkpoint = chosen and with_missing_export(chosen, trainer, self.num_steps)
        resumes = resumes_in_its_folder(trainer, self.checkpoint)
        if not resumes:
            require_models_outside(trainer)
        return resumes

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is of the last step or a later one, with nothing pending."""
        state = None if self.checkpoint is None else self.checkpoint.state
        return state is not None and state.global_step >= self.num_steps and not state.pending

    @property
    def saved(self) -> SavedState | None:
        """State from which the policy's ranks resume."""
        return None if self.checkpoint is None else self.checkpoint.saved

    def close(self) -> None:
        """Let another run use the folder of checkpoints; in a notebook this object outlives its run."""
        if self._checkpoint_lock is not None:
            self._checkpoint_lock.close()

    def request_stop(self) -> bool:
        """End after the current step; False if no step has begun, so the run has to be cancelled."""
        if self.loop is None:
            return False
        self.loop.stop()
        return True

    @property
    def num_steps(self) -> int:
        trainer = self.config.trainer
        steps = trainer.epochs * (self.num_train_rows // trainer.train_batch_size)
        return steps if trainer.max_training_steps < 0 else min(steps, trainer.max_training_steps)

    async def run(self, run_dir: RunDir) -> None:
        """Start the processes, train, and always stop them."""
        self._introduce(run_dir)
        with connect() as cluster:
            devices = "" if cluster.has_gpus else ", which has no GPUs now"
            self._say("local Ray is up" if cluster.is_local else f"joined the Ray cluster {cluster.address}{devices}")
            await self.fit_to_cluster(cluster)
            processes = await self.launch(cluster, str(run_dir.logs))
            try:
                await require_shared(self.config.trainer, processes.placement.slots[POLICY])
                self._say(self.started_line)
                await self._train(run_dir, processes)
            finally:
                await asyncio.shield(processes.stop())

    async def _train(self, run_dir: RunDir, processes: P) -> None:
        # Imported libraries never become garbage; scanning them took 0.14 s of every third step.
        gc.collect()
        gc.freeze()
        with ExitStack() as at_end:
            tracker = self.get_tracker(run_dir, self.num_steps)
            if not isinstance(tracker, Tracker):
                raise ValueError(
                    f"{type(self).__name__}.get_tracker returned a {type(tracker).__name__}: it must return a "
                    "skyrl_train.tracking.sinks.Tracker. Return Tracker([your_sink]), or name the sink's class in "
                    "trainer.logger"
                )
            at_end.callback(tracker.close)
            self.loop = self.build_loop(processes, run_dir, tracker, at_end)
            self.loop.run_id, self.loop.base = run_dir.run_id, self.base
            self.loop.run_folder = HeldFolder(run_dir.path, "trainer.run_dir", RECORD)
            at_end.callback(self.loop.run_folder.close)
            if self.checkpoint is not None:
                self.loop.resume(self.checkpoint)
            await self.loop.train()

    def _introduce(self, run_dir: RunDir) -> None:
        trainer = self.config.trainer
        layout = Layout(trainer.policy.megatron_config, trainer.placement.num_policy_ranks)
        lines = {"run": f"{trainer.run_name} in {run_dir}"}
        lines |= self.introduction(f"{layout.num_ranks} policy ranks ({layout.sizes})")
        if self.checkpoint is not None:
            lines["resumes"] = f"after step {self.checkpoint.state.global_step}, from {self.checkpoint.folder}"
        text = "\n".join(f"{label:<8}{line}" for label, line in lines.items())
        self._console.print(text, highlight=False, soft_wrap=True)
        used_later = {"trainer.run_dir": (run_dir.path, "")}
        if trainer.ckpt_interval > 0 or trainer.policy.model.lora.rank > 0:
            used_later[MODEL] = Path(self.model_folder), ", and checkpoints and adapters refer to it"
        for key, (path, loss) in used_later.items():
            if WORKING_COPIES in path.parts:
                log.warning(
                    "%s is %s: Ray deletes this copy of the working folder after the job%s. Set it to an absolute path",
                    *(key, path, loss),
                )

    def _explain(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, style="dim", markup=False)

    def _say(self, line: str) -> None:
        self._console.print(f"{time.perf_counter() - self._started:5.1f} s  {line}", style="dim", highlight=False)
