"""The engines as the trainer sees them: requests go to those that serve, other calls to all that are up, and one that
died is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from skyrl_train.cluster.background import Background
from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.replica import EngineReplica
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.rollout.router import Router
from skyrl_train.types import Generate
from skyrl_train.weight_sync.control import ControlMessage

SHUTDOWN_S = 15
"""Patience with engines that are asked to end."""
MEMORY_S = 10.0
"""Patience with an engine that is asked for its memory: a number of the log, not worth a wait."""
MARGIN_S = 10.0
"""Extra seconds the driver waits, so that the engine's own, more specific timeout arrives first."""

log = logging.getLogger(__name__)


class EnginePool:
    """All engines, each of them holding the same weights."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: Sequence[EngineSettings],
        log_folder: str,
        timeout_s: float,
        visible_devices: Sequence[str | None] | None = None,
        *,
        max_restarts: int = 0,
    ) -> None:
        """Asks Ray for the engines' processes and returns at once. Args: visible_devices of each engine, where they are
        not those that Ray gives it; max_restarts: replacements of an engine until it is given up, counted from 0 again
        when one has lived from one sync to the next."""
        names = tuple(f"engine-{index}" for index in range(len(settings)))
        self._calls = Calls(names, timeout_s, log_folder)
        devices = visible_devices or [None] * len(slots)
        self.replicas = tuple(
            EngineReplica(index, self._calls, slot, each, max_restarts, visible)
            for index, (slot, each, visible) in enumerate(zip(slots, settings, devices, strict=True))
        )
        self.num_changes = 0
        """Engines that died and came back so far: senders of weights must be reconnected when it has grown."""
        self._background = Background()
        self.router = Router(
            [partial(replica.generate, lose=self.lose) for replica in self.replicas], self._begin_rescue
        )
        self._restore: Callable[[], Awaitable[None]] | None = None
        self._rescue_task: asyncio.Task[None] | None = None

    @property
    def generate(self) -> Generate:
        """A request to an engine that dies is sent to another; it waits while there is none."""
        return self.router.generate

    @property
    def up(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas if replica.is_up]

    @property
    def actors(self) -> dict[str, Any]:
        """name -> actor of each engine that is up."""
        return {replica.name: replica.actor for replica in self.up}

    @property
    def num_workers(self) -> int:
        """Of the engines that are up."""
        return sum(replica.num_workers for replica in self.up)

    @property
    def nodes(self) -> set[str] | None:
        """Nodes of the engines that are up; None where they are servers, which may be outside of the cluster."""
        if not all(replica.settings.generator.run_engines_locally for replica in self.up):
            return None
        return {replica.started.node_id for replica in self.up if replica.started is not None}

    @property
    def shared_ranks(self) -> set[int]:
        """Policy ranks whose devices the engines that are up use, where they have none of their own."""
        return {rank for replica in self.up for rank in replica.slot.shares}

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines' HTTP endpoints, where they have them; known when they have started."""
        return tuple(url for replica in self.up if replica.started and (url := replica.started.facts.url) is not None)

    @property
    def has_replacement(self) -> bool:
        """Whether the start of a replacement has ended, well or not: `admit_replacements`."""
        return any(replica.replacement is not None and replica.replacement.done() for replica in self.replicas)

    def lose(self, replica: EngineReplica, reason: str) -> None:
        """Continue without this engine, which was up, and have another started in its place."""
        replica.is_up, replica.lost_because = False, reason
        self.num_changes += 1
        self.router.remove(replica.index)
        restarts = "it is replaced" if replica.restarts < replica.max_restarts else "it is not replaced any more"
        left = f"{len(self.up)} of {len(self.replicas)} engines go on"
        log.error("%s is lost: %s. %s; %s", replica.name, reason, left, restarts)
        replica.replacement = self._background.begin(replica.replace())

    async def drop_lost(self) -> list[str]:
        """Continue without the engines that do not say that they live. Returns: their names."""
        asked = self.up
        answers = await asyncio.gather(*(replica.lives() for replica in asked))
        lost = [replica for replica, lives in zip(asked, answers, strict=True) if replica.is_up and not lives]
        for replica in lost:
            self.lose(
                replica, f"it does not answer, its process crashed, was killed or hangs (log: {replica.log_path})"
            )
        return [replica.name for replica in lost]

    async def drop_blamed(self, error: RemoteFailed, before: int) -> str:
        """After a call that failed: continue without the engines that died. Returns: who they are.

        Args: before: `num_changes` when the call began. Raises: the error if no engine is to blame for it.
        """
        lost = await self.drop_lost()
        if self.num_changes == before:
            raise error
        return ", ".join(lost) or "an engine that was lost meanwhile"

    async def admit_replacements(self) -> None:
        """Call also those engines that were started in the place of dead ones; where none is left, wait for one.

        They hold the weights of the checkpoint, and get requests when a sync has ended with `resume`.
        Raises: RemoteFailed if no engine is left and none could be started.
        """
        while True:
            before = len(self.up)
            failures = [error for replica in self.replicas if (error := replica.admit()) is not None]
            self.num_changes += len(self.up) - before
            for error in failures:
                log.error("%s", error)
            if self.up:
                return
            starting = [replica.replacement for replica in self.replicas if replica.replacement is not None]
            if not starting:
                raise self._none_is_left() from (failures[0] if failures else None)
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    def _none_is_left(self) -> RemoteFailed:
        """What is to be raised then."""
        reasons = "; ".join(f"{each.name} is lost: {each.lost_because}" for each in self.replicas)
        limit = f"generator.max_engine_restarts={self.replicas[0].max_restarts}"
        return RemoteFailed(f"no engine is left ({limit}): {reasons}")

    def when_all_are_lost(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Have this called when a request finds no engine left: it does `admit_replacements`, an update, `resume`."""
        self._restore = restore

    def _begin_rescue(self) -> None:
        if self._rescue_task is None or self._rescue_task.done():
            self._rescue_task = self._background.begin(self._rescue())

    async def _rescue(self) -> None:
        """No engine is left to generate with: have one restored, or fail what is asked of them."""
        try:
            while self.router.is_holding:
                if self._restore is None:
                    raise self._none_is_left()
                await self._restore()
        except Exception as error:
            self.router.fail(error)

    async def prepare(self) -> None:
        """Have every engine do what it can before its device is free."""
        calls = [replica.actor.call.remote("prepare", replica.settings) for replica in self.replicas]
        await self._calls.gather("prepare", calls)

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found fit."""
        calls = [replica.actor.call.remote("start", replica.settings) for replica in self.replicas]
        for replica, started in zip(self.replicas, await self._calls.gather("start", calls), strict=True):
            replica.started = started

    def join_sender(self, info: ControlMessage) -> dict[str, Any]:
        """Have every engine that is up join a sender of weights.

        Returns: name -> the call that does it; for `joined`, and for the sender, which waits for the engines meanwhile.
        """
        calls, offset = {}, 1
        for replica in self.up:
            calls[replica.name] = replica.actor.call.remote("init_weight_sync", info | {"rank_offset": offset})
            offset += replica.num_workers
        return calls

    async def joined(self, calls: dict[str, Any]) -> None:
        """Raises: RemoteFailed for the first that fails."""
        indices = [replica.index for replica in self.replicas if replica.name in calls]
        await self._calls.gather("connect the weight sync", list(calls.values()), indices, self._sync_timeout_s)

    async def begin_weight_update(self) -> None:
        """Stop generating, forget every cached prefix and make ready for weights."""
        self.router.forget_routes()
        settings, timeout_s = self.replicas[0].settings, self._sync_timeout_s
        if settings.generator.pause_mode == "wait":
            timeout_s += settings.rpc_timeout_s
        await self._all("begin a weight update", "begin_weight_update", timeout_s=timeout_s)

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Raises: RemoteFailed if what an engine received is not what was sent, tensor by tensor."""
        what = "finish a weight update"
        await self._all(what, "finish_weight_update", policy_version, digests, timeout_s=self._sync_timeout_s)

    async def resume(self) -> None:
        """From now on the engines that are up get requests."""
        await self._all("resume", "resume", timeout_s=self._sync_timeout_s)
        for replica in self.up:
            replica.survived_sync()
            self.router.add(replica.index)

    async def pause(self) -> None:
        """Stop serving: running requests are frozen and new ones wait, until `resume`."""
        await self._each("pause", "pause", "keep", timeout_s=self._sync_timeout_s)

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights come back from host memory if kept, else with the next update."""
        self.router.forget_routes()
        await self._each("fall asleep", "sleep", keep_weights=keep_weights)

    async def wake_weights(self) -> None:
        await self._each("wake its weights", "wake_weights")

    async def wake_kv_cache(self) -> None:
        """Generation continues."""
        await self._each("wake its KV cache", "wake_kv_cache")

    async def memory(self) -> list[dict[str, float]]:
        """What each engine's worker holds, as `device.memory_in_use`; without engines that do not say."""
        asked = (replica.call("tell its memory", "memory", timeout_s=MEMORY_S) for replica in self.up)
        return [held for engine in await _outcomes(asked) if not isinstance(engine, RemoteFailed) for held in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Per engine, per prompt, the logprob of each token given those before it; 0 for the first."""
        names = list(self.actors)
        return dict(zip(names, await self._all("score prompts", "prompt_logprobs", prompts), strict=True))

    async def shutdown(self) -> None:
        """End the engines' processes; an engine that does not end by itself, or is dead already, is killed."""
        await self._background.end()
        calls = [asyncio.wrap_future(actor.call.remote("shutdown").future()) for actor in self.actors.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SHUTDOWN_S)
        for replica in self.replicas:
            await replica.end()

    @property
    def _sync_timeout_s(self) -> float:
        return self.replicas[0].settings.generator.weight_sync_timeout_s + MARGIN_S

    async def _all(self, what: str, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """`engine.method(*args)` on all that are up. Raises: RemoteFailed for the first that fails or if none is up."""
        up = self.up
        if not up:
            raise self._none_is_left()
        refs = [replica.actor.call.remote(method, *args) for replica in up]
        return await self._calls.gather(what, refs, [replica.index for replica in up], timeout_s)

    async def _each(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> None:
        """As `_all`, but every engine for itself: those that die are dropped and the others continue.

        Raises: RemoteFailed if one fails that lives, or none is left.
        """
        asked = self.up
        outcomes = await _outcomes(
            replica.call(what, method, *args, timeout_s=timeout_s, **kwargs) for replica in asked
        )
        failed = [(replica, end) for replica, end in zip(asked, outcomes, strict=True) if isinstance(end, RemoteFailed)]
        for replica, error in failed:
            if replica.is_up and await replica.lives():
                raise error
            if replica.is_up:  # else a request has noticed its loss meanwhile
                self.lose(replica, str(error))
        if not self.up:
            raise self._none_is_left() from (failed[0][1] if failed else None)


async def _outcomes(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What each call returned, or the RemoteFailed that it raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RemoteFailed):
            raise outcome
    return outcomes
