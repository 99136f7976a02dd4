"""Who holds how much memory, looked at once in each phase of a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.reference_group import ReferenceGroup
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)
GIB = 2**30
PATIENCE_S = 15.0


class MemoryReport:
    """Asks every process; the first look at each phase is also a line of the log.

    It is a metric: who does not answer is left out, and ends the run, or is replaced, where it is needed.
    """

    def __init__(self, policy: PolicyGroup, reference: ReferenceGroup | None, engines: EnginePool) -> None:
        of_its_own = None if reference is None or reference.is_policy else reference
        self._groups = {"policy": policy, "reference": of_its_own, "engine": engines}
        self._metrics: Metrics = {}
        self._logged: set[str] = set()

    async def look(self, phase: str) -> None:
        groups = {name: group for name, group in self._groups.items() if group is not None}
        answers = await asyncio.gather(*(_ask(name, group.memory()) for name, group in groups.items()))
        found = {name: processes for name, processes in zip(groups, answers, strict=True) if processes}
        if not found:
            return
        held = {name: max(one["reserved"] for one in processes) / GIB for name, processes in found.items()}
        free = min(one["free"] for processes in found.values() for one in processes) / GIB
        self._metrics |= {f"memory/{phase}/{name}_gib": value for name, value in held.items()}
        self._metrics[f"memory/{phase}/device_free_gib"] = free
        if phase not in self._logged:
            self._logged.add(phase)
            holders = ", ".join(f"{name} {value:.2f}" for name, value in held.items())
            log.info(
                "memory in %s, GiB of the largest rank: %s; free on the fullest device: %.2f", phase, holders, free
            )

    def metrics(self) -> Metrics:
        """`memory/{phase}/*` of the phases since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics


async def _ask(name: str, answer: Awaitable[list[dict[str, float]]]) -> list[dict[str, float]]:
    try:
        return await asyncio.wait_for(answer, PATIENCE_S)
    except (RemoteFailed, TimeoutError) as error:
        log.warning("the memory of the %s is not known: %s", name, error or f"no answer within {PATIENCE_S:g} s")
        return []
