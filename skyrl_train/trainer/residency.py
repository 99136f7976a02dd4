"""Who holds device memory when.

`Dedicated`: policy, reference and engines have devices (or, without GPUs, processes) of their own, so nothing has to
move. `Colocated`: they take turns on the same devices.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.reference_group import ReferenceGroup
from skyrl_train.cluster.ranks.release import Release
from skyrl_train.cluster.weight_sync import SyncResult, WeightSync
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, Moved
from skyrl_train.trainer.memory_report import MemoryReport
from skyrl_train.types import Group, Metrics

Start = Callable[[], Awaitable[None]]


class Residency(Protocol):
    """Called before each phase; returns when whoever works in it has its memory. Any order works."""

    async def for_rollout(self) -> None:
        """Engines can generate from the newest weights."""

    async def for_reference(self) -> None:
        """The reference can compute logprobs."""

    async def for_training(self) -> None:
        """The policy can compute logprobs and be updated."""

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        """The policy's weights are the engines'. Raises: what `WeightSync.publish` raises."""

    async def for_saving(self) -> None:
        """The policy's weights can be read."""

    async def start_again(self, policy: Start, reference: Start) -> None:
        """After a failure: have new processes of the trainers started, whatever the old ones, which are gone, held.

        The engines then have no right to answer before `sync_weights` and `for_rollout`.
        """

    def metrics(self) -> Metrics:
        """Of what moved since the last call."""


class Dedicated:
    """Every process keeps its memory for the whole run."""

    def __init__(self, weight_sync: WeightSync, report: MemoryReport) -> None:
        self._weight_sync, self._report = weight_sync, report

    async def for_rollout(self) -> None:
        """Engines: weights and KV cache are on their devices already."""

    async def for_reference(self) -> None:
        """The reference is on its devices already."""

    async def for_training(self) -> None:
        """Policy weights and optimizer are on their devices already."""

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        await self._report.look("training")
        return await self._weight_sync.publish(groups)

    async def for_saving(self) -> None:
        """Policy weights are on their devices already."""

    async def start_again(self, policy: Start, reference: Start) -> None:
        await reference()
        await policy()

    def metrics(self) -> Metrics:
        return self._report.metrics()


class Colocated:
    """One step: engines generate, then drop weights and KV cache; the reference works and leaves, the policy works, and
    sends its weights into the engines while neither the optimizer nor the KV cache is on the device. Its weights stay
    until the KV cache wants their room, so that an export finds them."""

    def __init__(
        self,
        policy: PolicyGroup,
        reference: ReferenceGroup | None,
        engines: EnginePool,
        weight_sync: WeightSync,
        release: Release,
        report: MemoryReport,
    ) -> None:
        """All trainers have left their devices and the engines are awake, as `launch` leaves them."""
        self._policy, self._engines = policy, engines
        self._policy_is_reference = reference is not None and reference.is_policy
        self._reference = None if self._policy_is_reference else reference
        self._weight_sync, self._release, self._report = weight_sync, release, report
        self._policy_parts: frozenset[str] = frozenset()
        """What of the policy is on its devices."""
        self._reference_is_in = False
        self._engines_are: Literal["awake", "without KV cache", "half loaded", "asleep", "without weights"] = "awake"
        """"half loaded": they may hold memory, and have no right to answer before a whole sync."""
        self._moved: dict[str, list[Moved]] = {}

    async def for_rollout(self) -> None:
        await self._reference_leaves()
        if self._engines_are in ("without weights", "half loaded"):
            await self.sync_weights(())
        await self._policy_leaves()
        if self._engines_are != "awake":
            await self._timed("engine_wake", self._wake_engines())
        await self._report.look("rollout")

    async def for_reference(self) -> None:
        await self._engines_leave()
        if self._reference is not None and not self._reference_is_in:
            await self._policy_leaves()
            self._note("reload", await self._release.enter(self._reference))
            self._reference_is_in = True
        if self._policy_is_reference:
            await self._policy_enters(WEIGHTS)

    async def for_training(self) -> None:
        await self._engines_leave()
        if self._reference_is_in:
            await self._report.look("reference")
        await self._reference_leaves()
        await self._policy_enters(WEIGHTS, OPTIMIZER)

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        await self._report.look("training")
        await self._reference_leaves()
        await self._policy_enters(WEIGHTS)
        await self._policy_leaves(OPTIMIZER)
        before, self._engines_are = self._engines_are, "half loaded"
        if before not in ("awake", "without KV cache"):
            await self._timed("engine_wake", self._engines.wake_weights())
        result, expected = await self._weight_sync.send(groups)
        self._engines_are = "awake" if before == "awake" else "without KV cache"
        await self._report.look("sync")
        if expected is not None:
            await self._policy_leaves()
            await self._timed("engine_wake", self._wake_engines())
            await self._weight_sync.verify(expected)
        return result

    async def for_saving(self) -> None:
        await self._reference_leaves()
        if WEIGHTS not in self._policy_parts and self._engines_are == "awake":
            self._engines_are = "asleep"  # also if one of them fails, so that `for_rollout` wakes the others
            await self._timed("engine_sleep", self._engines.sleep(keep_weights=True))
        await self._policy_enters(WEIGHTS)

    async def start_again(self, policy: Start, reference: Start) -> None:
        await self._engines_leave()
        self._policy_parts = frozenset()
        await reference()
        if self._reference is not None:
            self._note("offload", await self._release.leave(self._reference))
        self._reference_is_in = False
        await policy()
        self._policy_parts = frozenset((WEIGHTS, OPTIMIZER))

    def metrics(self) -> Metrics:
        metrics = self._report.metrics()
        for name, moved in self._moved.items():
            metrics[f"timing/{name}"] = sum(one.seconds for one in moved)
        copied = [one for one in self._moved.get("offload", ()) if one.num_bytes]
        if copied:  # what comes back may still be under way
            gigabytes = sum(one.num_bytes for one in copied) / 1e9
            metrics["perf/offload_gb_per_s"] = gigabytes / sum(one.seconds for one in copied)
        self._moved = {}
        return metrics

    async def _engines_leave(self) -> None:
        if self._engines_are != "without weights":  # also "asleep", from which a wake may have failed halfway
            self._engines_are = "half loaded"  # if one of them fails: it may hold memory, the others are asleep
            await self._timed("engine_sleep", self._engines.sleep())
        self._engines_are = "without weights"

    async def _wake_engines(self) -> None:
        await self._engines.wake_weights()
        await self._engines.wake_kv_cache()
        self._engines_are = "awake"

    async def _reference_leaves(self) -> None:
        if self._reference is not None and self._reference_is_in:
            self._note("offload", await self._release.leave(self._reference))
            self._reference_is_in = False

    async def _policy_enters(self, *parts: str) -> None:
        if missing := [part for part in parts if part not in self._policy_parts]:
            self._note("reload", await self._release.enter(self._policy, *missing))
            self._policy_parts |= set(missing)

    async def _policy_leaves(self, *parts: str) -> None:
        if leaving := [part for part in parts or (WEIGHTS, OPTIMIZER) if part in self._policy_parts]:
            self._note("offload", await self._release.leave(self._policy, *leaving))
            self._policy_parts -= set(leaving)

    async def _timed(self, name: str, call: Awaitable[None]) -> None:
        started = time.perf_counter()
        await call
        self._note(name, Moved(0, time.perf_counter() - started))

    def _note(self, name: str, moved: Moved) -> None:
        self._moved.setdefault(name, []).append(moved)
