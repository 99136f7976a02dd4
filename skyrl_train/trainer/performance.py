"""How close a step came to the hardware, from what its parts report."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.ranks.policy_group import UpdateTotals
from skyrl_train.cluster.weight_way import SyncResult
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics


def training_performance(num_tokens: int, update: UpdateTotals, timers: Timers) -> Metrics:
    """`perf/*` of an update on `num_tokens` tokens; MFU where the peak of the device is known."""
    metrics = {
        "perf/train_tokens_per_s": num_tokens / timers.metrics()["timing/policy_train"],
        "perf/pipeline_bubble": update.bubble,
    }
    return metrics if update.mfu is None else metrics | {"perf/mfu": update.mfu}


def rollout_performance(groups: Sequence[Group], timers: Timers) -> Metrics:
    """`perf/*` of drawing the samples."""
    written = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
    return {"perf/generate_tokens_per_s": written / timers.metrics()["timing/generate"]}


def sync_performance(sync: SyncResult) -> Metrics:
    """`perf/*` of a weight sync."""
    return {"perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9}
