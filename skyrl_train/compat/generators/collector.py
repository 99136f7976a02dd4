"""A generator of skyrl_train 0.4 as the collector of a source's groups, and 0.4's generator of environments."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_train.compat.generators.client import CURRENT, Call, of_repetition, sampling_params_of
from skyrl_train.compat.generators.outputs import input_of, output_of, samples_of, token_rewards, with_output
from skyrl_train.compat.generators.types import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryOutput,
)
from skyrl_train.rollout.admission import Admission, Failure
from skyrl_train.rollout.collect import Collector, Progress, Result, all_or_first_error, task_name
from skyrl_train.rollout.contract import Engines, Requests, Rollout
from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import Group, Prompt, SamplingParams

Report = Callable[[Mapping[str, Any]], None]


class GeneratorCollector(Collector):
    """Calls `generate` once for each group."""

    def __init__(
        self, generator: GeneratorInterface, rollout: Rollout, engines: Engines, step: Callable[[], int], report: Report
    ) -> None:
        """Args: rollout: the one that plays environments; report: receives the rollout_metrics of training samples."""
        super().__init__(rollout, engines)
        self._generator, self._step, self._report = generator, step, report
        self._phase: TrainingPhase = "eval"
        self._policy_version: Callable[[], int] = lambda: 0

    def for_training(self, policy_version: Callable[[], int]) -> GeneratorCollector:
        """The collector of training samples."""
        collector = copy.copy(self)
        collector._phase, collector._policy_version = "train", policy_version
        return collector

    async def collect(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling_params: SamplingParams,
        progress: Progress,
        admission: Admission,
        *,
        with_greedy: bool = False,
    ) -> list[Group]:
        """Like `Collector.collect`. Raises: ValueError for greedy responses, which generators do not make."""
        if with_greedy:
            raise ValueError("the advantage estimator compares with greedy responses, which a generator does not make")
        progress.start(len(prompts) * n_samples)
        try:
            results = await all_or_first_error(
                [
                    (task_name(prompt), self._group(prompt, n_samples, sampling_params, progress, admission))
                    for prompt in prompts
                ]
            )
        finally:
            progress.stop()
        groups = (admission.finish(prompt, made) for prompt, made in zip(prompts, results, strict=True))
        return [group for group in groups if group is not None]

    async def _group(
        self, prompt: Prompt, n_samples: int, params: SamplingParams, progress: Progress, admission: Admission
    ) -> list[Result]:
        """A result for each sample. A generator that leaves samples out does not say which: they count as failed."""
        made: list[Result] = []
        problem: Exception = RuntimeError("the generator returned no output for a sample")
        for attempt in range(1, admission.num_attempts + 1):
            call = Call(self.engines.for_a_rollout(), seeded(params, prompt.uid), prompt.uid, self._rollout)
            CURRENT.set(call)  # of this task
            version = self._policy_version()
            metadata = BatchMetadata(self._step(), self._phase)
            try:
                output = await self._generator.generate(input_of(prompt, n_samples, call.params, metadata))
                version = min(call.versions, default=version)
                samples = samples_of(output, prompt, version, self.engines.tokenizer)
                made = [[sample] for sample in samples]
            except Exception as error:
                problem = error
            if call.engines.error is not None:
                raise call.engines.error from call.engines.error.__cause__
            if made or attempt == admission.num_attempts:
                break
            admission.retry(Failure(prompt.uid, problem))
        if made:
            for sample in samples:
                progress.advance([sample])
            if self._phase == "train":
                self._report(output.get("rollout_metrics") or {})
        missing = n_samples - len(made)
        return [*made, *(admission.fail(Failure(prompt.uid, problem)) for _ in range(missing))]


class Postprocessed(Collector):
    """A collector whose groups go through `postprocess_generator_output` of a trainer of 0.4."""

    def __init__(self, inner: Collector, hook: Callable[[GeneratorOutput, list[str]], GeneratorOutput]) -> None:
        self._inner, self._hook = inner, hook

    @property
    def requests(self) -> Requests:
        return self._inner.requests

    async def collect(self, *arguments: Any, **named: Any) -> list[Group]:
        groups = await self._inner.collect(*arguments, **named)
        return [
            with_output(group, self._hook(output_of(group), [group.prompt.uid] * len(group.samples)))
            for group in groups
        ]


class SkyRLGymGenerator(GeneratorInterface):
    """Plays environments. A subclass may override `agent_loop` or `generate`; otherwise the default rollout runs."""

    def __init__(
        self, generator_cfg: Any, skyrl_gym_cfg: Any, inference_engine_client: Any, tokenizer: Any, model_name: str
    ) -> None:
        self.generator_cfg, self.skyrl_gym_cfg = generator_cfg, skyrl_gym_cfg
        self.inference_engine_client, self.tokenizer, self.model_name = inference_engine_client, tokenizer, model_name
        self.max_turns = generator_cfg.max_turns

    async def agent_loop(
        self,
        prompt: list[dict[str, str]],
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int,
        max_input_length: int,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: Any = None,
    ) -> TrajectoryOutput:
        """One sample by the default rollout."""
        call = CURRENT.get()
        repetition = 0 if trajectory_id is None else trajectory_id.repetition_id
        engines, params = of_repetition(call, repetition)
        row = Prompt(call.uid, list(prompt), env_class, dict(env_extras), str(env_extras.get("data_source", "unknown")))
        try:
            sample = await call.rollout(row, sampling_params_of(sampling_params, params), engines)
        finally:
            call.engines.error = call.engines.error or engines.error
        assert not isinstance(sample, list), "the default rollout makes one sample"
        call.versions.append(sample.policy_version)
        (output,) = (output_of(Group(row, (sample,))),)
        return TrajectoryOutput(
            response_ids=output["response_ids"][0],
            reward=output["rewards"][0],
            stop_reason=sample.stop_reason,
            loss_mask=output["loss_masks"][0],
            prompt_ids=output["prompt_token_ids"][0],
            rollout_logprobs=(output["rollout_logprobs"] or [[]])[0],
            env_metrics=sample.env_metrics,
        )

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The trajectories of `agent_loop`, all at once."""
        from skyrl_train.compat.generators.functions import get_rollout_metrics

        prompts, classes = input_batch["prompts"], input_batch["env_classes"]
        extras = input_batch["env_extras"] or [{} for _ in prompts]
        ids: Sequence[Any] = input_batch["trajectory_ids"] or [None] * len(prompts)
        longest, context = self.generator_cfg.sampling_params.max_generate_length, self.generator_cfg.max_input_length
        params = input_batch["sampling_params"]
        made = await asyncio.gather(
            *(
                self.agent_loop(
                    prompt, env_class, extra, longest, context, sampling_params=params, trajectory_id=trajectory_id
                )
                for prompt, env_class, extra, trajectory_id in zip(prompts, classes, extras, ids, strict=True)
            )
        )
        has_lists = any(isinstance(each.reward, list) for each in made)
        rewards: Any = [
            token_rewards(each.reward, len(each.response_ids)) if has_lists else each.reward for each in made
        ]
        logprobs: Any = [each.rollout_logprobs for each in made]
        responses = [each.response_ids for each in made]
        return GeneratorOutput(
            prompt_token_ids=[each.prompt_ids for each in made],
            response_ids=responses,
            rewards=rewards,
            loss_masks=[each.loss_mask for each in made],
            stop_reasons=[each.stop_reason for each in made],
            rollout_metrics=get_rollout_metrics(responses, rewards, [each.env_metrics for each in made], classes),
            rollout_logprobs=None if None in logprobs else logprobs,
        )
