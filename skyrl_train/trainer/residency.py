"""Which of policy, scorers and engines holds device memory in which phase of a step.

`Residency`: nothing moves, because each has dedicated devices (or, without GPUs, processes), or because all fit on
those that they share. `Colocated`: they share devices and free them for each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.cluster.weight_sync import SyncResult, WeightSync
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, Moved
from skyrl_train.trainer.performance import MemoryReport
from skyrl_train.types import Group, Metrics

Restart = Callable[[], Awaitable[None]]


class Residency:
    """Every process keeps its memory for the whole run.

    Called before each phase; returns when the processes of that phase have their memory, after any other phase.
    """

    def __init__(self, weight_sync: WeightSync, scorers: Sequence[ScorerGroup], report: MemoryReport) -> None:
        self._weight_sync, self._scorers, self._report = weight_sync, scorers, report

    async def for_rollout(self) -> None:
        """Make the engines ready to generate from the newest weights."""

    async def for_scoring(self, scorer: ScorerGroup) -> None:
        """Make the scorer's model ready to compute."""

    async def for_training(self) -> None:
        """Make the policy ready to compute logprobs and to be updated."""

    async def for_checkpoint(self) -> None:
        """Make the policy's whole state readable, also if no engine is left."""

    async def for_saving(self) -> None:
        """Make the policy's weights readable."""

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        """Send the policy's weights to the engines. Raises: like `WeightSync.publish`."""
        await self._report.measure("training")
        return await self._weight_sync.publish(groups)

    async def restart_trainers(self, restart_policy: Restart) -> None:
        """After a failure, when the policy's processes have ended: start new processes of policy and scorers.

        The caller then runs `sync_weights` and `for_rollout` before engines serve again.
        Args: restart_policy: loads the state to resume from, which only the caller knows.
        """
        for scorer in self._scorers:
            await _restart(scorer)
        await restart_policy()

    def metrics(self) -> Metrics:
        """Memory of each phase, and times and rates of what moved, since the last call."""
        return self._report.metrics()


class Colocated(Residency):
    """Engines, scorers and policy use the same devices, one after the other:

    1. engines generate, then drop weights and KV cache;
    2. each scorer computes and is offloaded; the critic, which is the last of them, also trains;
    3. the policy trains, and offloads its optimizer;
    4. engines allocate their weights and receive the policy's;
    5. the policy's weights stay for an export until the next rollout needs the memory for the KV cache.
    """

    def __init__(
        self,
        policy: PolicyGroup,
        scorers: Sequence[ScorerGroup],
        engines: EnginePool,
        weight_sync: WeightSync,
        report: MemoryReport,
    ) -> None:
        """Trainers are offloaded and the engines awake, as `launch` leaves them."""
        super().__init__(weight_sync, scorers, report)
        self._policy, self._engines = policy, engines
        self._policy_parts: frozenset[str] = frozenset()
        """Parts of the policy on the devices."""
        self._resident_scorer: ScorerGroup | None = None
        """The scorer that has its own processes and is on the devices."""
        self._engines_are: Literal["awake", "without KV cache", "half loaded", "asleep", "without weights"] = "awake"
        """
        - awake: weights and KV cache are on the devices; without KV cache: only the weights;
        - asleep: weights are in host memory; without weights: they come with the next sync;
        - half loaded: a change is under way or has failed; they may hold memory and must not serve before a sync.
        """
        self._moved: dict[str, list[Moved]] = {}

    async def for_rollout(self) -> None:
        await self._scorer_leaves()
        if self._engines_are in ("without weights", "half loaded"):
            await self.sync_weights(())
        await self._policy_leaves()
        if self._engines_are != "awake":
            await self._timed("engine_wake", self._wake_engines())
        await self._report.measure("rollout")

    async def for_scoring(self, scorer: ScorerGroup) -> None:
        await self._engines_leave()
        if scorer.is_policy:
            await self._scorer_leaves()
            await self._policy_enters(WEIGHTS)
        elif self._resident_scorer is None or scorer.model is not self._resident_scorer.model:
            await self._scorer_leaves()
            await self._policy_leaves()
            self._note("reload", await scorer.model.reload())
            self._resident_scorer = scorer

    async def for_training(self) -> None:
        await self._engines_leave()
        await self._scorer_leaves()
        await self._policy_enters(WEIGHTS, OPTIMIZER)

    async def for_checkpoint(self) -> None:
        try:
            await self.for_training()
        except RemoteFailed:
            if self._engines.up:
                raise
            with contextlib.suppress(RemoteFailed):  # waits until the dead engines have ended, then says so
                await self._engines.admit_replacements()
            self._engines_are = "without weights"
            await self.for_training()

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        await self._report.measure("training")
        await self._scorer_leaves()
        await self._policy_enters(WEIGHTS)
        await self._policy_leaves(OPTIMIZER)
        before = self._engines_are
        self._engines_are = "half loaded"
        if before not in ("awake", "without KV cache"):
            await self._timed("engine_wake", self._engines.wake_weights())
        result, expected = await self._weight_sync.send(groups)
        self._engines_are = "awake" if before == "awake" else "without KV cache"
        await self._report.measure("sync")
        if expected is not None:
            await self._policy_leaves()
            await self._timed("engine_wake", self._wake_engines())
            await self._weight_sync.verify(expected)
        return result

    async def for_saving(self) -> None:
        await self._scorer_leaves()
        if WEIGHTS not in self._policy_parts and self._engines_are == "awake":
            self._engines_are = "asleep"  # set first: if an engine fails here, `for_rollout` still wakes the others
            await self._timed("engine_sleep", self._engines.sleep(keep_weights=True))
        await self._policy_enters(WEIGHTS)

    async def restart_trainers(self, restart_policy: Restart) -> None:
        await self._engines_leave()
        self._policy_parts, self._resident_scorer = frozenset(), None
        for scorer in self._scorers:
            await _restart(scorer)
            if not scorer.is_policy:
                self._note("offload", await scorer.model.offload())
        await restart_policy()
        self._policy_parts = frozenset((WEIGHTS, OPTIMIZER))

    def metrics(self) -> Metrics:
        metrics = super().metrics()
        for name, moved in self._moved.items():
            metrics[f"timing/{name}"] = sum(move.seconds for move in moved)
        copied = [move for move in self._moved.get("offload", ()) if move.num_bytes]
        if copied:  # reloads may be asynchronous
            gigabytes = sum(move.num_bytes for move in copied) / 1e9
            metrics["perf/offload_gb_per_s"] = gigabytes / sum(move.seconds for move in copied)
        self._moved = {}
        return metrics

    async def _engines_leave(self) -> None:
        if self._engines_are != "without weights":  # also "asleep", since a wake may have failed halfway
            self._engines_are = "half loaded"  # set first: an engine that fails here may still hold memory
            await self._timed("engine_sleep", self._engines.sleep())
        self._engines_are = "without weights"

    async def _wake_engines(self) -> None:
        await self._engines.wake_weights()
        await self._engines.wake_kv_cache()
        self._engines_are = "awake"

    async def _scorer_leaves(self) -> None:
        if (scorer := self._resident_scorer) is not None:
            await self._report.measure(scorer.name)
            self._note("offload", await scorer.model.offload())
            self._resident_scorer = None

    async def _policy_enters(self, *parts: str) -> None:
        if missing := [part for part in parts if part not in self._policy_parts]:
            self._note("reload", await self._policy.reload(*missing))
            self._policy_parts |= set(missing)

    async def _policy_leaves(self, *parts: str) -> None:
        if leaving := [part for part in parts or (WEIGHTS, OPTIMIZER) if part in self._policy_parts]:
            self._note("offload", await self._policy.offload(*leaving))
            self._policy_parts -= set(leaving)

    async def _timed(self, name: str, call: Awaitable[None]) -> None:
        started = time.perf_counter()
        await call
        self._note(name, Moved(0, time.perf_counter() - started))

    def _note(self, name: str, moved: Moved) -> None:
        self._moved.setdefault(name, []).append(moved)


async def _restart(scorer: ScorerGroup) -> None:
    """Replace the processes of a scorer that has its own, also if an earlier restart failed."""
    if not scorer.is_policy:
        await scorer.model.kill()
        await scorer.model.restart()
