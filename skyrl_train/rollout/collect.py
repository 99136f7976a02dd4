"""Many concurrent rollouts -> Groups."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from skyrl_train.rollout.admission import Admission, Failure
from skyrl_train.rollout.contract import Engines, Requests, Rollout
from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import Group, Prompt, Sample, SamplingParams

Result = list[Sample] | Failure
T = TypeVar("T")


class Progress(Protocol):
    """Receives rollouts as they end."""

    def start(self, total: int) -> None:
        """Before the first of `total` rollouts."""

    def advance(self, samples: Sequence[Sample]) -> None:
        """A rollout ended with these samples."""

    def stop(self) -> None:
        """After the last, or after an error."""


class Silent:
    """Progress that nobody sees, such as that of one group of a step; subclasses count it."""

    def start(self, total: int) -> None:
        pass

    def advance(self, samples: Sequence[Sample]) -> None:
        pass

    def stop(self) -> None:
        pass


class Collector:
    """Collects the samples of many prompts, all in flight at once."""

    def __init__(self, rollout: Rollout, engines: Engines) -> None:
        self._rollout, self.engines = rollout, engines

    @property
    def requests(self) -> Requests:
        return self.engines.requests

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
        """Return the groups of `n_samples` rollouts of each prompt, in the order of the prompts, without failed ones.

        Args: sampling_params: with a seed, each rollout gets one derived from it, the prompt's uid and its own index;
            with_greedy: generate another, greedy response for each prompt.
        Raises: errors of the admission and of the engines, after all other rollouts have been cancelled.
        """
        params = [sampling_params] * n_samples + [replace(sampling_params, temperature=0.0)] * with_greedy
        progress.start(len(prompts) * len(params))
        try:
            results = await all_or_first_error(
                [
                    (task_name(prompt), rollouts)
                    for prompt in prompts
                    for rollouts in self._rollouts(prompt, params, progress, admission)
                ]
            )
        finally:
            progress.stop()
        flat, groups = [result for made in results for result in made], []
        for i, prompt in enumerate(prompts):
            own_results = flat[i * len(params) : (i + 1) * len(params)]
            greedy = own_results.pop() if with_greedy else ()
            groups.append(admission.finish(prompt, own_results, greedy))
        return [group for group in groups if group is not None]

    def _rollouts(
        self, prompt: Prompt, params: Sequence[SamplingParams], progress: Progress, admission: Admission
    ) -> list[Coroutine[Any, Any, list[Result]]]:
        """Calls that run concurrently, and together have one result for each of `params`."""
        return [
            self._result(prompt, seeded(own, prompt.uid, index), progress, admission)
            for index, own in enumerate(params)
        ]

    async def _result(
        self, prompt: Prompt, sampling_params: SamplingParams, progress: Progress, admission: Admission
    ) -> list[Result]:
        for attempt in range(1, admission.num_attempts + 1):
            engines = self.engines.for_a_rollout()
            try:
                samples = _samples(await self._rollout(prompt, sampling_params, engines))
            except Exception as error:
                if engines.error is not None:
                    raise engines.error from engines.error.__cause__
                failure = Failure(prompt.uid, error)
                if attempt < admission.num_attempts:
                    admission.retry(failure)
                    continue
                return [admission.fail(failure)]
            progress.advance(samples)
            return [samples]
        raise AssertionError("num_attempts is at least 1")


def _samples(made: object) -> list[Sample]:
    """Raises: TypeError for anything but a sample or a list of at least one."""
    samples = [made] if isinstance(made, Sample) else made
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise TypeError(f"the rollout returned {made!r:.200}. Return a Sample or a list of at least one")
    return samples


def task_name(prompt: Prompt) -> str:
    """Name of the tasks in which the prompt's rollouts run."""
    return f"prompt {prompt.uid}"


async def all_or_first_error(calls: Sequence[tuple[str, Coroutine[Any, Any, T]]]) -> list[T]:
    """Unlike asyncio.TaskGroup, raise the first error itself, not an ExceptionGroup with those that followed.

    Args: calls: names and coroutines of the tasks.
    """
    if not calls:
        return []
    tasks = [asyncio.create_task(call, name=name) for name, call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task in done]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
