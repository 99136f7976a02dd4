"""How close a step came to the hardware, from what its parts report."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.policy_group import SyncResult, UpdateTotals
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics


def training_performance(num_tokens: int, update: UpdateTotals, timers: Timers) -> Metrics:
    """`perf/*` of an update on `num_tokens` tokens; MFU where the peak of the device is known."""
    metrics = {
        "perf/train_tokens_per_s": num_tokens / timers.metrics()["timing/policy_train"],
        "perf/pipeline_bubble": update.bubble,
    }
    return metrics if update.mfu is None else metrics | {"perf/mfu": update.mfu}


def performance_metrics(groups: Sequence[Group], update: UpdateTotals, sync: SyncResult, timers: Timers) -> Metrics:
    """`perf/*` of a step of reinforcement learning."""
    timings = timers.metrics()
    samples = [sample for group in groups for sample in group.samples]
    written = sum(int(sample.loss_mask.sum()) for sample in samples)
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "perf/generate_tokens_per_s": written / timings["timing/generate"],
        "perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9,
    } | training_performance(tokens, update, timers)
