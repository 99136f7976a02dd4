"""How close a step came to the hardware, from what its parts report."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.policy_group import SyncResult, UpdateTotals
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics


def performance_metrics(groups: Sequence[Group], update: UpdateTotals, sync: SyncResult, timers: Timers) -> Metrics:
    """`perf/*` of a step; MFU where the peak of the device is known."""
    timings = timers.metrics()
    samples = [sample for group in groups for sample in group.samples]
    written = sum(int(sample.loss_mask.sum()) for sample in samples)
    tokens = sum(len(sample.token_ids) for sample in samples)
    metrics = {
        "perf/generate_tokens_per_s": written / timings["timing/generate"],
        "perf/train_tokens_per_s": tokens / timings["timing/policy_train"],
        "perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9,
        "perf/pipeline_bubble": update.bubble,
    }
    if update.mfu is not None:
        metrics["perf/mfu"] = update.mfu
    return metrics
