"""One run, from a checked configuration to its end. Subclass it to change a part."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import yaml
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, to_yaml
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.order import PromptOrder
from skyrl_train.data.prompts import load_prompts
from skyrl_train.envs.registry import env_creator
from skyrl_train.hub import local_folder
from skyrl_train.model_checks import longest_conversation
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.env_pool import EnvPool
from skyrl_train.rollout.sample import RolloutSettings, Sampler
from skyrl_train.tracking.progress import ConsoleProgress
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.tracking.sinks import Tracker, build_tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.tracking.transcripts import TranscriptLog
from skyrl_train.trainer.evaluation import Evaluation
from skyrl_train.trainer.publish import Publisher
from skyrl_train.trainer.residency import Dedicated
from skyrl_train.trainer.rules import advantage, micro_batch_rules, objective, sampling_params
from skyrl_train.trainer.sync_check import SyncCheck
from skyrl_train.trainer.trainer import Parts, Trainer
from skyrl_train.types import Prompt

log = logging.getLogger(__name__)
WORKING_COPIES = "working_dir_files"
"""Folder in which Ray unpacks the working folders of submitted jobs."""


class Experiment:
    """Builds the parts of a run and runs it. `get_*` are the parts that users replace."""

    def __init__(self, config: Config, console: Console) -> None:
        """Loads the tokenizer and the prompts.

        Raises: ValueError for a bad row, an unknown environment or a model that cannot be had.
        """
        self.config, self._console = config, console
        self._started = time.perf_counter()
        self.model_folder = local_folder(config.trainer.policy.model.path)
        self.model_config = AutoConfig.from_pretrained(self.model_folder)
        self.tokenizer = self.get_tokenizer()
        self.train_prompts = self.get_train_prompts()
        self.val_prompts = self.get_val_prompts()
        for env_class in {prompt.env_class for prompt in (*self.train_prompts, *self.val_prompts)}:
            env_creator(env_class)
        self._trainer: Trainer | None = None

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.model_folder)

    def get_train_prompts(self) -> list[Prompt]:
        return self._load(self.config.data.train_data)

    def get_val_prompts(self) -> list[Prompt]:
        return self._load(self.config.data.val_data) if self.config.data.val_data else []

    def get_tracker(self, run_dir: RunDir, num_steps: int) -> Tracker:
        trainer = self.config.trainer
        values = yaml.safe_load(to_yaml(self.config))
        return build_tracker(
            trainer.logger, run_dir.path, trainer.project_name, trainer.run_name, values, total_steps=num_steps
        )

    def _load(self, sources: tuple[str, ...]) -> list[Prompt]:
        loaded = load_prompts(
            sources,
            tokenizer=self.tokenizer,
            max_prompt_length=self.config.trainer.max_prompt_length,
            default_env_class=self.config.environment.env_class,
            chat_template_kwargs=self.config.generator.chat_template_kwargs,
        )
        if loaded.num_dropped:
            log.warning(
                "%s: dropped %d of %d prompts, which have more than trainer.max_prompt_length=%d tokens",
                ", ".join(sources),
                loaded.num_dropped,
                loaded.num_dropped + len(loaded.prompts),
                self.config.trainer.max_prompt_length,
            )
        return loaded.prompts

    def request_stop(self) -> bool:
        """End after the step in flight; False if no step has begun, so that the run has to be cancelled."""
        if self._trainer is None:
            return False
        self._trainer.stop()
        return True

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        trainer = self.config.trainer
        steps = trainer.epochs * (len(self.train_prompts) // trainer.train_batch_size)
        return steps if trainer.max_training_steps < 0 else min(steps, trainer.max_training_steps)

    async def run(self, run_dir: RunDir) -> None:
        """Start the processes, train, and stop them again, whatever happens."""
        trainer = self.config.trainer
        mini_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
        goal = objective(
            trainer.algorithm,
            self.config.generator.sampling_params,
            trainer.policy.megatron_config.logprobs_chunk_size,
        )
        self._introduce(run_dir)
        with connect() as cluster:
            self._say("local Ray is up" if cluster.is_local else f"joined the Ray cluster {cluster.address}")
            processes = await launch(
                self.config,
                cluster,
                min(longest_conversation(self.config.generator), self.model_config.max_position_embeddings),
                goal,
                self.num_steps * mini_batches * trainer.update_epochs_per_batch,
                str(run_dir.logs),
            )
            try:
                self._say("policy and engines are up")
                await self._train(run_dir, processes)
            finally:
                await asyncio.shield(processes.stop())

    async def _train(self, run_dir: RunDir, processes: Processes) -> None:
        config = self.config
        # The libraries imported so far never become garbage; looking through them took 0.14 s of every third step.
        gc.collect()
        gc.freeze()
        env_pool = EnvPool(config.environment.skyrl_gym.max_env_workers, config.environment.step_timeout_s)
        tracker = self.get_tracker(run_dir, self.num_steps)
        transcripts = TranscriptLog(run_dir.samples, self._console)
        try:
            parts = self._parts(processes, env_pool, tracker, transcripts)
            self._trainer = Trainer(config, parts, self.num_steps)
            await self._trainer.train()
        finally:
            tracker.close()
            transcripts.close()
            env_pool.close(timeout_s=5)

    def _parts(self, processes: Processes, env_pool: EnvPool, tracker: Tracker, transcripts: TranscriptLog) -> Parts:
        config, trainer, generator = self.config, self.config.trainer, self.config.generator
        sampler = Sampler(
            generate=processes.engines.generate,
            chat=ChatTemplate(self.tokenizer, generator.chat_template_kwargs),
            env_pool=env_pool,
            settings=RolloutSettings(
                max_turns=generator.max_turns,
                max_input_length=generator.max_input_length,
                env_kwargs=config.environment.skyrl_gym.env_kwargs,
            ),
        )
        collector = Collector(sampler)
        progress = ConsoleProgress(self._console)
        rules = micro_batch_rules(config, self.model_config, processes.policy.dp_size)
        coarser_dtype = "bfloat16" if trainer.bf16 else generator.model_dtype
        check = SyncCheck(trainer.verify_sync_every, coarser_dtype, rules, on_gpu=processes.cluster.has_gpus)
        return Parts(
            prompts=PromptOrder(self.train_prompts, batch_size=trainer.train_batch_size, seed=trainer.seed),
            collector=collector,
            evaluation=Evaluation(
                self.val_prompts,
                collector,
                ConsoleProgress(self._console, "evaluate"),
                n_samples=generator.eval_n_samples_per_prompt,
                sampling_params=sampling_params(generator.eval_sampling_params),
                batch_size=trainer.eval_batch_size,
            ),
            advantage=advantage(trainer.algorithm),
            rules=rules,
            policy=processes.policy,
            reference=processes.reference,
            residency=Dedicated(Publisher(processes.policy, processes.engines, generator.model_dtype, check)),
            tracker=tracker,
            transcripts=transcripts,
            progress=progress,
            timers=Timers(),
        )

    def _introduce(self, run_dir: RunDir) -> None:
        trainer, generator = self.config.trainer, self.config.generator
        layout, place = trainer.policy.megatron_config, trainer.placement
        sizes = {
            "tp": layout.tensor_model_parallel_size,
            "pp": layout.pipeline_model_parallel_size,
            "cp": layout.context_parallel_size,
            "ep": layout.expert_model_parallel_size,
        }
        ranks = place.policy_num_nodes * place.policy_num_gpus_per_node
        sizes["dp"] = ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        split = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "not split"
        lines = (
            f"run     {trainer.run_name} in {run_dir.path}",
            f"model   {trainer.policy.model.path}, {ranks} policy ranks ({split}), "
            f"{generator.num_inference_engines} engine(s)",
            f"data    {len(self.train_prompts)} prompts, {len(self.val_prompts)} held out",
            f"steps   {self.num_steps} of {trainer.train_batch_size} prompts x "
            f"{generator.n_samples_per_prompt} samples, "
            f"{trainer.train_batch_size // trainer.policy_mini_batch_size} mini-batch(es) each",
        )
        self._console.print("\n".join(lines), highlight=False, soft_wrap=True)
        if WORKING_COPIES in run_dir.path.parts:
            log.warning(
                "%s lies in the job's own copy of its working folder, which Ray deletes after the job; set "
                "trainer.run_dir to an absolute path",
                run_dir.path,
            )

    def _say(self, what: str) -> None:
        self._console.print(f"{time.perf_counter() - self._started:5.1f} s  {what}", style="dim", highlight=False)
