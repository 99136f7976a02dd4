"""Many samples at once -> Groups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from skyrl_train.rollout.sample import Sampler
from skyrl_train.types import Group, Prompt, Sample, SamplingParams


class Progress(Protocol):
    """Told of samples as they come in."""

    def start(self, total: int) -> None:
        """Before the first; `total` samples will come."""

    def advance(self, sample: Sample) -> None:
        """One more."""

    def stop(self) -> None:
        """No more will come, also after an error."""


class Collector:
    """Collects the samples of many prompts, all of them in flight at once."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def collect(
        self, prompts: Sequence[Prompt], n_samples: int, sampling_params: SamplingParams, progress: Progress
    ) -> list[Group]:
        """`n_samples` samples of each prompt, in the order of the prompts.

        Raises: the first error of a sample (EnvironmentFailure, GenerationAborted, ...), after every other sample in
            flight has been cancelled; no part of the groups is returned then.
        """
        progress.start(len(prompts) * n_samples)
        tasks = [
            asyncio.ensure_future(self._one(prompt, sampling_params, progress))
            for prompt in prompts
            for _ in range(n_samples)
        ]
        try:
            samples = await _all_or_first_error(tasks)
        finally:
            progress.stop()
        return [Group(prompt, tuple(samples[i * n_samples : (i + 1) * n_samples])) for i, prompt in enumerate(prompts)]

    async def _one(self, prompt: Prompt, sampling_params: SamplingParams, progress: Progress) -> Sample:
        sample = await self._sampler.sample(prompt, sampling_params)
        progress.advance(sample)
        return sample


async def _all_or_first_error(tasks: Sequence[asyncio.Task[Sample]]) -> list[Sample]:
    """Not asyncio.TaskGroup, whose ExceptionGroup would hide the one error that matters among its followers."""
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError:
        await _cancel(tasks)
        raise
    errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
    if errors:
        await _cancel(tasks)
        raise errors[0]
    return [task.result() for task in tasks]


async def _cancel(tasks: Sequence[asyncio.Task[Sample]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
