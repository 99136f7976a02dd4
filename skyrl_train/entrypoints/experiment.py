"""One run of reinforcement learning. Subclass it to change a part."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from rich.console import Console

from skyrl_train.checks.distillation import check_data_sources
from skyrl_train.checks.engines import check_vllm
from skyrl_train.checks.model_folder import check_scoring_models
from skyrl_train.checks.staleness import double_weight_warning, quantization_warning, treatment_of_quantization
from skyrl_train.checks.step import doubt_about_lengths, doubt_about_loss, doubt_about_penalty
from skyrl_train.cluster.devices import endpoint_warning
from skyrl_train.cluster.launch import Processes
from skyrl_train.cluster.pool.settings import served_model_name
from skyrl_train.cluster.session import Cluster, known_device_type
from skyrl_train.config import Config
from skyrl_train.config.errors import ConfigError
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.hints import KEY, Hints, check_template, hint_of_template
from skyrl_train.data.prompts import configured_prompts
from skyrl_train.entrypoints.run import Run
from skyrl_train.entrypoints.verify_template.before_run import check_conversations
from skyrl_train.imports import imported
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, Requests, Rollout
from skyrl_train.rollout.dialogue import dialogue_class
from skyrl_train.rollout.env_pool import EnvPool
from skyrl_train.rollout.sample import Sampler, check_environments
from skyrl_train.rollout.source import SOURCES, GroupSource, SourceParts
from skyrl_train.rollout.streaming.watchdog import deadline_s
from skyrl_train.tracking.progress import ConsoleProgress
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.tracking.samples import EVALUATIONS, SampleLog
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.tracking.transcripts import TranscriptLog
from skyrl_train.trainer.build import Assembly, launch_training, teacher_max_model_len
from skyrl_train.trainer.evaluation import Evaluation, EvaluationBeside
from skyrl_train.trainer.from_config import sampling_params
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.trainer.trainer import Parts, Trainer
from skyrl_train.types import Generate, Prompt

log = logging.getLogger(__name__)


class Experiment(Run[Config, Processes]):
    """A run of reinforcement learning. Users replace its parts by overriding `get_*`."""

    started_line = "policy and engines are up"

    def __init__(self, config: Config, console: Console) -> None:
        """Raises: ValueError for a bad row, an unknown environment or a model that cannot be loaded."""
        super().__init__(config, console)
        self.train_prompts = self.get_train_prompts()
        self.val_prompts = self.get_val_prompts()
        if (reserved := config.generator.eval_num_engines) and not self.val_prompts:
            raise ConfigError(
                [f"generator.eval_num_engines is {reserved}, and there are no held-out prompts. Set data.val_data"]
            )
        self.hints = self.get_hints()
        check_vllm(config, self.model_config, known_device_type())
        self._check_environments()
        self._check_conversations()
        if config.trainer.source in SOURCES:  # another may give other rows
            check_data_sources(config, {prompt.data_source for prompt in self.train_prompts})

    @property
    def _has_default_rollout(self) -> bool:
        return self.config.generator.rollout is None and type(self).get_rollout is Experiment.get_rollout

    def _check_environments(self) -> None:
        """Raises: ValueError for an environment that is unknown, not used, or cannot be created."""
        check_environments(self.config, self.train_prompts, self.val_prompts, are_created=self._has_default_rollout)

    def _check_conversations(self) -> None:
        """Raises: ValueError if the chat template does not fit the form of conversations of several turns."""
        generator = self.config.generator
        if generator.max_turns > 1 and self._has_default_rollout:
            chat = ChatTemplate(self.tokenizer, generator.chat_template_kwargs)
            first = (self.train_prompts or self.val_prompts)[0]
            check_conversations(self.config, chat.for_row(first.extras), self.model_folder, first.messages)

    def check_models(self) -> None:
        """Raises: ValueError for a reference, critic or teacher that cannot score the policy's tokens."""
        check_scoring_models(self.config.trainer, self.tokenizer, known_device_type())
        teacher_max_model_len(self.config, self.model_config)

    def get_train_prompts(self) -> list[Prompt]:
        return configured_prompts(self.config, self.tokenizer, self.config.data.train_data)

    def get_val_prompts(self) -> list[Prompt]:
        sources = self.config.data.val_data
        return configured_prompts(self.config, self.tokenizer, sources) if sources else []

    def get_hints(self) -> Hints | None:
        """The hints in the prompts of teachers. Raises: ValueError for a row that does not fit the template."""
        hint, generator = self.config.trainer.algorithm.distillation.distillation_hint, self.config.generator
        if hint is None:
            return None
        chat = ChatTemplate(self.tokenizer, generator.chat_template_kwargs)
        if "{" not in hint:
            return Hints(imported(KEY, hint), chat)
        response = generator.sampling_params.max_generate_length if generator.max_turns == 1 else None
        # An engine generates a token after those that it scores.
        longest = self.model_config.max_position_embeddings - self.config.trainer.teacher.is_served
        length = check_template(hint, self.train_prompts, chat, max_tokens=longest, max_response=response)
        return Hints(hint_of_template(hint), chat, None if response is None else length + response)

    @property
    def num_train_rows(self) -> int:
        return len(self.train_prompts)

    async def launch(self, cluster: Cluster, logs: str) -> Processes:
        trainer = self.config.trainer
        mini_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
        num_optimizer_steps = self.num_steps * mini_batches * trainer.update_epochs_per_batch
        processes = await launch_training(
            self.config, self.model_config, cluster, num_optimizer_steps, logs, self.saved, self.hints
        )
        for index, url in enumerate(processes.engines.urls):
            served = f"{served_model_name(self.config)}@{processes.policy.policy_version}"
            self._say(f"engine {index} serves {served} at {url}/v1")
        if (warning := endpoint_warning(self.config.generator)) is not None:
            log.warning(warning)
        return processes

    def get_rollout(self, env_pool: EnvPool) -> Rollout:
        """The rollout of `generator.rollout`, or by default the one that plays environments."""
        if self.config.generator.rollout is not None:
            rollout: Rollout = imported("generator.rollout", self.config.generator.rollout)
            return rollout
        env_kwargs = self.config.environment.env_kwargs
        return Sampler(env_pool, env_kwargs, self.config.extra, dialogue_class(self.config.generator)).sample

    def get_source(self, parts: SourceParts) -> GroupSource:
        name = self.config.trainer.source
        build: Callable[[SourceParts], GroupSource] = imported("trainer.source", SOURCES.get(name, name))
        return build(parts)

    def get_trainer(self, parts: Parts) -> Trainer:
        return Trainer(self.config, parts, self.num_steps)

    def build_loop(self, processes: Processes, run_dir: RunDir, tracker: Tracker, at_end: ExitStack) -> Trainer:
        rollout, samples = self.get_rollout(self.get_env_pool(at_end)), self.get_samples(run_dir, tracker, at_end)
        return self.get_trainer(self._parts(processes, rollout, tracker, samples))

    def get_env_pool(self, at_end: ExitStack) -> EnvPool:
        """The workers of environments, closed by `at_end`."""
        environment = self.config.environment
        env_pool = EnvPool(environment.skyrl_gym.max_env_workers, environment.step_timeout_s)
        at_end.callback(env_pool.close, timeout_s=5)
        return env_pool

    def get_samples(self, run_dir: RunDir, tracker: Tracker, at_end: ExitStack) -> SampleLog:
        """The log of samples, closed by `at_end`."""
        transcripts = TranscriptLog(run_dir.samples, self._console)
        at_end.callback(transcripts.close)
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        return SampleLog(transcripts, run_dir.path / EVALUATIONS, decode, tracker)

    def get_collector(self, generate: Generate, rollout: Rollout) -> Collector:
        generator = self.config.generator
        engines = Engines(
            generate,
            self.tokenizer,
            ChatTemplate(self.tokenizer, generator.chat_template_kwargs),
            max_input_length=generator.max_input_length,
            max_turns=generator.max_turns,
            config=self.config,
            # Some models that are evaluated alone, such as those with images, have it elsewhere.
            vocab_size=getattr(self.model_config.get_text_config(), "vocab_size", None),
        )
        # Rollouts of a stream also run while the trainer holds shared devices, so their source watches them.
        is_stream = self.config.trainer.source == "streaming"
        deadline = None if is_stream else deadline_s(self.config, num_attempts=1)
        return Collector(rollout, engines, deadline)

    def _watched(self, collector: Collector) -> Collector:
        """The collector for evaluations, with a deadline of their own also in a streaming run."""
        watched = copy.copy(collector)
        watched.engines = copy.copy(collector.engines)
        watched.engines.requests = Requests(others=collector.requests)
        watched.deadline_s = deadline_s(self.config, num_attempts=1)
        return watched

    def get_evaluation(self, collector: Collector, samples: SampleLog) -> Evaluation:
        config, generator = self.config, self.config.generator
        keep = {"keep": samples.evaluation} if config.trainer.dump_eval_results else {}
        return Evaluation(
            self.val_prompts,
            collector,
            ConsoleProgress(self._console, "evaluate"),
            n_samples=generator.eval_n_samples_per_prompt,
            sampling_params=sampling_params(generator.eval_sampling_params),
            batch_size=config.trainer.eval_batch_size,
            max_failed_share=generator.max_failed_share,
            pass_threshold=config.environment.pass_threshold,
            zeroes_unfinished=generator.zero_reward_on_non_stop,
            **keep,
        )

    def _parts(self, processes: Processes, rollout: Rollout, tracker: Tracker, samples: SampleLog) -> Parts:
        config, generator, timers = self.config, self.config.generator, Timers()
        collector = self.get_collector(processes.engines.generate, rollout)
        assembly = Assembly(config, self.model_config, processes, timers)
        source_parts = SourceParts(
            config=config,
            prompts=self.train_prompts,
            sampling_params=sampling_params(generator.sampling_params),
            collector=collector,
            progress=ConsoleProgress(self._console),
            timers=timers,
            policy_version=lambda: processes.policy.policy_version,
            num_steps=self.num_steps,
            with_greedy=assembly.with_greedy,
            wake_engines=assembly.residency.for_rollout,
        )
        source, evaluation = self.get_source(source_parts), self.get_evaluation(self._watched(collector), samples)
        # Engines that sleep during updates freeze an evaluation beside them for longer than a deadline allows.
        unwatched = self.get_evaluation(collector, samples)
        is_frozen = config.trainer.placement.takes_turns
        beside = EvaluationBeside(unwatched if is_frozen else evaluation, source_parts.policy_version)
        if (reserved := processes.eval_engines) is not None:
            own = self._watched(self.get_collector(reserved.generate, rollout))
            on_reserved = self.get_evaluation(own, samples)

            async def load_weights() -> None:
                with timers("sync_eval_engines"):
                    await reserved.load()

            beside = EvaluationBeside(on_reserved, source_parts.policy_version, load_weights)
        return Parts(
            step=assembly.step(source, Publisher(assembly.residency, timers), hints=self.hints),
            evaluation=evaluation,
            beside=beside,
            tracker=tracker,
            samples=samples,
        )

    def introduction(self, layout: str) -> dict[str, str]:
        trainer, generator = self.config.trainer, self.config.generator
        for doubt in (
            doubt_about_loss(trainer),
            doubt_about_lengths(self.config),
            doubt_about_penalty(trainer.algorithm),
            double_weight_warning(trainer.algorithm),
            quantization_warning(self.config),
        ):
            if doubt is not None:
                log.warning("%s", doubt)
        treatment = treatment_of_quantization(self.config)
        kind = "engine(s)" if generator.run_engines_locally else "running vLLM server(s)"
        engines = f"{generator.num_engines} {kind}"
        if generator.eval_num_engines:
            engines += f", {generator.eval_num_engines} of them for evaluation"
        streaming = f", streaming: {trainer.depth} batch(es) ahead, at most {trainer.staleness} step(s) stale"
        return {
            "model": f"{trainer.policy.model.path}, {layout}, {engines}",
            **({} if treatment is None else {"engines": treatment}),
            "data": f"{len(self.train_prompts)} prompts, {len(self.val_prompts)} held out",
            "steps": f"{self.num_steps} of {trainer.train_batch_size} prompts x "
            f"{generator.n_samples_per_prompt} samples, "
            f"{trainer.train_batch_size // trainer.policy_mini_batch_size} mini-batch(es) each"
            f"{streaming if trainer.source == 'streaming' else ''}",
        }
