"""How close a step came to the hardware: tokens and bytes per second, and the memory that each process holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup, UpdateReports
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics

log = logging.getLogger(__name__)
GIB = 2**30
MEMORY_TIMEOUT_S = 15.0


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
    """`perf/*` of generating the samples; empty if they were not generated in this step."""
    if (seconds := timers.metrics().get("timing/generate")) is None:
        return {}
    samples = {id(sample): sample for group in groups for sample in group.samples}.values()  # groups may be copies
    written = sum(count for sample in samples for _, count in sample.known_spans)  # also of tokens that are masked
    return {"perf/generate_tokens_per_s": written / seconds}


class MemoryReport:
    """Memory of every process in each phase; the first measurement of a phase is also logged.

    Processes that do not answer are left out: this is a metric, and failures are handled where the process is needed.
    """

    def __init__(self, policy: PolicyGroup, scorers: Sequence[ScorerGroup], engines: EnginePool) -> None:
        self._groups: dict[str, ModelGroup | EnginePool] = {"policy": policy}
        self._groups |= {scorer.name: scorer.model for scorer in scorers if not scorer.is_policy}
        self._groups["engine"] = engines
        self._metrics: Metrics = {}
        self._logged: set[str] = set()

    async def measure(self, phase: str) -> None:
        answers = await asyncio.gather(*(_memory(name, group.memory()) for name, group in self._groups.items()))
        found = {name: processes for name, processes in zip(self._groups, answers, strict=True) if processes}
        if not found:
            return
        held = {name: max(memory["reserved"] for memory in processes) / GIB for name, processes in found.items()}
        free = min(memory["free"] for processes in found.values() for memory in processes) / GIB
        self._metrics |= {f"memory/{phase}/{name}_gib": value for name, value in held.items()}
        self._metrics[f"memory/{phase}/device_free_gib"] = free
        if phase not in self._logged:
            self._logged.add(phase)
            text = ", ".join(f"{name} {value:.2f}" for name, value in held.items())
            log.info("memory in %s, GiB of the largest rank: %s; free on the fullest device: %.2f", phase, text, free)

    def metrics(self) -> Metrics:
        """`memory/{phase}/*` of the phases since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics


async def _memory(name: str, answer: Awaitable[list[dict[str, float]]]) -> list[dict[str, float]]:
    try:
        return await asyncio.wait_for(answer, MEMORY_TIMEOUT_S)
    except (RemoteFailed, TimeoutError) as error:
        reason = error or f"no answer within {MEMORY_TIMEOUT_S:g} s"
        log.warning("memory of the %s is missing in the metrics: %s", name, reason)
        return []
