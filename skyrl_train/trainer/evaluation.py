"""Scores on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.rollout.collect import Collector, Progress
from skyrl_train.rollout.metrics import evaluation_metrics
from skyrl_train.types import Group, Metrics, Prompt, SamplingParams


class Evaluation:
    """Draws samples of every held-out prompt, `batch_size` prompts in flight."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        collector: Collector,
        progress: Progress,
        *,
        n_samples: int,
        sampling_params: SamplingParams,
        batch_size: int,
    ) -> None:
        self._prompts, self._collector, self._progress = prompts, collector, progress
        self._n_samples, self._sampling_params, self._batch_size = n_samples, sampling_params, batch_size

    @property
    def has_prompts(self) -> bool:
        return bool(self._prompts)

    async def run(self) -> tuple[Metrics, list[Group]]:
        """`eval/*` metrics and the samples they are of."""
        groups: list[Group] = []
        for start in range(0, len(self._prompts), self._batch_size):
            batch = self._prompts[start : start + self._batch_size]
            groups += await self._collector.collect(batch, self._n_samples, self._sampling_params, self._progress)
        return evaluation_metrics(groups), groups
