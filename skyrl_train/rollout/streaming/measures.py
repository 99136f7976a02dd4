"""Metrics of a streaming source: staleness of its tokens, idle time of trainer and engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from skyrl_train.rollout.streaming.buffer import Buffer, Finished
from skyrl_train.types import Group, Metrics


@dataclass(slots=True)
class StreamMetrics:
    """`async/*` of the last batch: staleness of its tokens, idle time of trainer and engines."""

    clock: Callable[[], float] = time.perf_counter
    values: Metrics = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """Policy version -> the last step that began with it."""
    _taken_s: float | None = None
    _idle_since_s: float | None = None
    _idle_s: float = 0.0

    def note_running(self, number: int) -> None:
        """Count time without a group that engines can generate as idle."""
        now = self.clock()
        if self._idle_since_s is not None:
            self._idle_s += now - self._idle_since_s
        self._idle_since_s = None if number else now

    def take(self, batch: Sequence[Finished[Group]], buffer: Buffer[Group], waited_s: float) -> None:
        step, now = buffer.step, self.clock()
        samples = [sample for finished in batch for sample in finished.item.samples]
        tokens = [
            (step - self.steps[version], count)
            for sample in samples
            if sample.loss_mask.any()  # else it is masked, such as one that was truncated
            for version, count in sample.known_spans
            if version in self.steps and count
        ]
        total = sum(count for _, count in tokens)
        self.values = {
            "async/staleness_mean": sum(behind * count for behind, count in tokens) / max(1, total),
            "async/staleness_max": float(max((behind for behind, _ in tokens), default=0)),
            "async/staleness_in_flight": fmean([each.step - each.ticket.step for each in batch]),
            "async/staleness_in_queue": fmean([step - each.step for each in batch]),
            "async/running": float(len(buffer.running)),
            "async/ready": float(len(buffer.ready)),
        }
        self.values |= {
            f"async/share_{behind}_behind": sum(count for each, count in tokens if each == behind) / max(1, total)
            for behind in range(buffer.max_staleness + 1)
        }
        if self._taken_s is not None:
            elapsed_s = max(now - self._taken_s, 1e-9)
            self.values["async/trainer_wait_share"] = waited_s / elapsed_s
            self.values["async/engine_idle_share"] = min(1.0, self._idle_s / elapsed_s)
            generated = sum(count for sample in samples for _, count in sample.known_spans)
            self.values["perf/generate_tokens_per_s"] = generated / elapsed_s
        self._taken_s, self._idle_s = now, 0.0
