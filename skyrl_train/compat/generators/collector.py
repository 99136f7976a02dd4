"""A generator of skyrl_train 0.4 as the collector of a source's groups, and 0.4's generator of environments."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.compat.generators.client import CURRENT, Call
from skyrl_train.compat.generators.outputs import conversations_of, input_of, output_of, token_rewards, with_output
from skyrl_train.compat.generators.types import (
    BatchMetadata,
    GeneratorInterface,
    GeneratorOutput,
    TrainingPhase,
)
from skyrl_train.faults import described, is_cancellation
from skyrl_train.rollout.admission import Admission, Failure
from skyrl_train.rollout.collect import Collector, Progress, Result
from skyrl_train.rollout.contract import Engines, Requests, Rollout, RolloutFailure
from skyrl_train.rollout.seeds import seeded
from skyrl_train.rollout.shaping import has_signal, zero_unfinished
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample, SamplingParams

Report = Callable[[Mapping[str, Any]], None]


class GeneratorCollector(Collector):
    """Calls `generate` once for each group."""

    def __init__(
        self,
        generator: GeneratorInterface,
        rollout: Rollout,
        engines: Engines,
        step: Callable[[], int],
        report: Report,
        deadline_s: float | None = None,
    ) -> None:
        """Args: rollout: the one that plays environments; step: number of steps that were trained; report: receives the
        rollout_metrics of training samples.
        """
        super().__init__(rollout, engines, deadline_s)
        self._generator, self._step, self._report = generator, step, report
        self._phase: TrainingPhase = "eval"
        self._policy_version: Callable[[], int] = lambda: UNKNOWN_VERSION
        self._needs_logprobs = False
        self.gives_token_rewards = False
        """Whether the rewards of the last group were lists with one number per token."""

    def for_training(self, policy_version: Callable[[], int], *, needs_logprobs: bool) -> GeneratorCollector:
        """The collector of training samples. Args: policy_version: that of the engines when a group begins."""
        collector = copy.copy(self)
        collector._phase, collector._policy_version = "train", policy_version
        collector._needs_logprobs = needs_logprobs
        return collector

    def _rollouts(
        self, prompt: Prompt, params: Sequence[SamplingParams], progress: Progress, admission: Admission
    ) -> list[Coroutine[Any, Any, list[Result]]]:
        """One call. Raises: ValueError for greedy responses, which generators do not make."""
        if params[-1] != params[0]:
            raise ValueError("the advantage estimator compares with greedy responses, which a generator does not make")
        return [self._group(prompt, len(params), params[0], progress, admission)]

    async def _group(
        self, prompt: Prompt, n_samples: int, params: SamplingParams, progress: Progress, admission: Admission
    ) -> list[Result]:
        """A result for each input. A generator that leaves samples out does not say which: they count as failed."""
        for attempt in range(1, admission.num_attempts + 1):
            made: list[list[Sample]] = []
            call = Call(self.engines, seeded(params, prompt.uid), prompt, self._rollout)
            try:
                output = await self._output(call, n_samples)
                made = self._conversations(output, call, n_samples)
                self.gives_token_rewards = any(isinstance(each, list | tuple) for each in output["rewards"])
                problem: Exception = ValueError(
                    f"the generator returned {len(made)} complete trajectories for {n_samples} inputs"
                )
            except Exception as error:
                problem = error
            except (SystemExit, asyncio.CancelledError) as error:
                if is_cancellation(error):
                    raise
                problem = RolloutFailure(f"the generator failed ({prompt.name}): {described(error, __file__)}")
            if call.error is not None:
                raise call.error from call.error.__cause__
            if made or attempt == admission.num_attempts:
                break
            admission.retry(Failure(prompt.name, problem))
        if made and self._phase == "train":
            self._report(output.get("rollout_metrics") or {})
        for samples in made:
            progress.advance(samples)
        return [*made, *(admission.fail(Failure(prompt.name, problem)) for _ in range(n_samples - len(made)))]

    async def _output(self, call: Call, n_samples: int) -> GeneratorOutput:
        call.versions.append(self._policy_version())
        metadata = BatchMetadata(self._step() + (self._phase == "train"), self._phase)
        CURRENT.set(call)  # of this task and those that the generator starts
        return await self._generator.generate(input_of(call.prompt, n_samples, call.params, metadata))

    def _conversations(self, output: GeneratorOutput, call: Call, n_samples: int) -> list[list[Sample]]:
        """Raises: ValueError for an output that cannot be trained."""
        began, *answered = call.versions
        version = min(answered, default=began)
        tokenizer, size = self.engines.tokenizer, self.engines.vocab_size
        made = conversations_of(output, call.prompt, n_samples, version, tokenizer, size)
        are_missing = any(sample.rollout_logprobs.isnan().any() for samples in made for sample in samples)
        if are_missing and self._needs_logprobs:
            raise ValueError(
                "the generator returned samples without rollout_logprobs, and the update needs them. Return those of "
                "the engines, or set trainer.algorithm.corrections=[] and trainer.source=on_policy"
            )
        return made


@dataclass
class Postprocessed(Collector):
    """A collector whose groups go through `postprocess_generator_output` of a trainer of 0.4.

    Like in 0.4, rewards of unfinished samples are zeroed before, and groups without signal are filtered before.
    """

    inner: Collector
    hook: Callable[[GeneratorOutput, list[str]], GeneratorOutput]
    gives_token_rewards: Callable[[], bool]
    """Whether the hook gets one reward per token."""
    filters: bool
    """Whether the source filters groups without signal."""
    zeroes_unfinished: bool

    @property
    def requests(self) -> Requests:
        return self.inner.requests

    async def collect(self, *arguments: Any, **named: Any) -> list[Group]:
        groups = await self.inner.collect(*arguments, **named)
        self.tail_s = self.inner.tail_s
        if self.zeroes_unfinished:
            groups = [zero_unfinished(group) for group in groups]
        return [group if self.filters and not has_signal(group) else self._hooked(group) for group in groups]

    def _hooked(self, group: Group) -> Group:
        hooked = self._changed(group)
        if not group.greedy:
            return hooked
        return replace(hooked, greedy=self._changed(Group(group.prompt, group.greedy)).samples)

    def _changed(self, group: Group) -> Group:
        output = output_of(group)
        if self.gives_token_rewards():
            lengths = map(len, output["response_ids"])
            output["rewards"] = [token_rewards(*each) for each in zip(output["rewards"], lengths, strict=True)]
        return with_output(group, self.hook(output, [group.prompt.uid] * len(group.samples)))
