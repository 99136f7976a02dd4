"""How close a step came to the hardware, from what its parts report."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.ranks.policy_group import UpdateReports
from skyrl_train.cluster.weight_sync import SyncResult
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics


def training_performance(num_tokens: int, update: UpdateReports, timers: Timers) -> Metrics:
    """`perf/*` of an update on `num_tokens` tokens; MFU where the peak of the devices is known."""
    schedule = sum(report.schedule_seconds for report in update.ranks)
    bubble = 1 - sum(report.busy_seconds for report in update.ranks) / schedule if schedule else 0.0
    metrics = {
        "perf/train_tokens_per_s": num_tokens / timers.metrics()["timing/policy_train"],
        "perf/pipeline_bubble": max(0.0, bubble),
    }
    peaks = [report.peak_flops for report in update.ranks if report.peak_flops is not None]
    if len(peaks) == len(update.ranks):
        metrics["perf/mfu"] = update.flops / (max(report.seconds for report in update.ranks) * sum(peaks))
    return metrics


def rollout_performance(groups: Sequence[Group], timers: Timers) -> Metrics:
    """`perf/*` of generating the samples; nothing where they were not generated in this step."""
    if (seconds := timers.metrics().get("timing/generate")) is None:
        return {}
    written = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
    return {"perf/generate_tokens_per_s": written / seconds}


def sync_performance(sync: SyncResult) -> Metrics:
    """`perf/*` of a weight sync."""
    return {"perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9}
