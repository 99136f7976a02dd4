"""Scores on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.rollout.admission import Admission
from skyrl_train.rollout.collect import Collector, Progress
from skyrl_train.rollout.metrics import evaluation_metrics
from skyrl_train.types import Group, Metrics, Prompt, SamplingParams


class Evaluation:
    """Samples responses to every held-out prompt, `batch_size` prompts in flight."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        collector: Collector,
        progress: Progress,
        *,
        n_samples: int,
        sampling_params: SamplingParams,
        batch_size: int,
        max_failed_share: float,
    ) -> None:
        self._prompts, self._collector, self._progress = prompts, collector, progress
        self._admission = Admission(max_failed_share)
        self._n_samples, self._sampling_params, self._batch_size = n_samples, sampling_params, batch_size

    @property
    def has_prompts(self) -> bool:
        return bool(self._prompts)

    async def run(self, seed: int) -> Metrics:
        """Return `eval/*`. Args: seed: determines the samples for given weights."""
        groups: list[Group] = []
        sampling_params = replace(self._sampling_params, seed=seed)
        self._admission.begin(len(self._prompts) * self._n_samples)
        for start in range(0, len(self._prompts), self._batch_size):
            batch = self._prompts[start : start + self._batch_size]
            groups += await self._collector.collect(
                batch, self._n_samples, sampling_params, self._progress, self._admission
            )
        return evaluation_metrics(groups)
