"""All engines of a run: routes requests to those that serve, calls all that are up, and replaces dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from skyrl_train.cluster.background import Background
from skyrl_train.cluster.calls import Calls, RemoteFailed, results_of
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.replica import EngineReplica
from skyrl_train.cluster.pool.router import Router
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.types import Generate
from skyrl_train.weight_sync.control import ControlMessage

SHUTDOWN_S = 15
"""Seconds for engines to shut down before they are killed."""
MEMORY_S = 10.0
"""Timeout in seconds for an engine's memory, which is only logged."""
MARGIN_S = 10.0
"""Extra seconds the driver waits, so that the engine's own, more specific timeout arrives first."""

log = logging.getLogger(__name__)


class EnginePool:
    """All engines; they hold the same weights."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: Sequence[EngineSettings],
        log_folder: str,
        timeout_s: float,
        visible_devices: Sequence[str | None] | None = None,
        *,
        max_restarts: int = 0,
        name: str = "engine",
    ) -> None:
        """Request the engines' processes from Ray and return at once.
        Args: visible_devices: per engine, unless Ray sets them; max_restarts: consecutive restarts of an engine; name:
        of an engine in logs.
        """
        names = tuple(f"{name}-{index}" for index in range(len(settings)))
        self._calls = Calls(names, timeout_s, log_folder)
        devices = visible_devices or [None] * len(slots)
        self.replicas = tuple(
            EngineReplica(index, self._calls, slot, each, max_restarts, visible)
            for index, (slot, each, visible) in enumerate(zip(slots, settings, devices, strict=True))
        )
        self.num_changes = 0
        """Number of deaths and restarts so far; when it changes, senders of weights must reconnect."""
        self._background = Background()
        self.router = Router(
            [partial(replica.generate, mark_dead=self.mark_dead) for replica in self.replicas], self._begin_rescue
        )
        self.generate: Generate = self.router.generate
        """A request to an engine that dies is sent to another; it waits while none is up."""
        self.restore: Callable[[], Awaitable[None]] | None = None
        """Called when a request finds no engine: `admit_replacements`, then a weight update."""
        self._rescue_task: asyncio.Task[None] | None = None
        self._updated: list[EngineReplica] | None = None
        """Engines of the last weight update; others are up and wait for the next one. None before the first."""

    @property
    def updated(self) -> list[EngineReplica]:
        """Engines that are up and took part in the last weight update."""
        return self.up if self._updated is None else [replica for replica in self._updated if replica.is_up]

    @property
    def up(self) -> list[EngineReplica]:
        return [replica for replica in self.replicas if replica.is_up]

    @property
    def actors(self) -> dict[str, Any]:
        """name -> actor of each engine that is up."""
        return {replica.name: replica.actor for replica in self.up}

    @property
    def num_workers(self) -> int:
        return sum(replica.num_workers for replica in self.up)

    @property
    def nodes(self) -> set[str] | None:
        """Nodes of the engines that are up; None for servers, which may be outside the cluster."""
        if not all(replica.settings.generator.run_engines_locally for replica in self.up):
            return None
        return {replica.started.node_id for replica in self.up if replica.started is not None}

    @property
    def shared_ranks(self) -> set[int]:
        """Policy ranks that share a device with an engine that is up."""
        return {rank for replica in self.up for rank in replica.slot.shares}

    @property
    def urls(self) -> tuple[str, ...]:
        """HTTP endpoints of the started engines that have one."""
        return tuple(url for replica in self.up if replica.started and (url := replica.started.facts.url) is not None)

    @property
    def has_replacement(self) -> bool:
        """Whether `admit_replacements` has a restart to handle, successful or failed."""
        return any(replica.replacement is not None and replica.replacement.done() for replica in self.replicas)

    def mark_dead(self, replica: EngineReplica, reason: str) -> None:
        """Continue without this engine, which was up, and restart it. Args: reason: a sentence that names it."""
        replica.is_up, replica.death_cause = False, reason
        self.num_changes += 1
        self._updated = self._updated and [other for other in self._updated if other is not replica]
        self.router.remove(replica.index)
        restart = f"restarting {replica.name} ({replica.restarts + 1} of {replica.max_restarts})"
        if replica.restarts >= replica.max_restarts:
            restart = f"not restarting {replica.name} (generator.max_engine_restarts={replica.max_restarts})"
        left = f"{len(self.up)} of {len(self.replicas)} engines are left"
        log.error("%s. %s; %s", reason, left, restart)
        replica.replacement = self._background.begin(replica.replace())

    async def drop_dead(self) -> list[str]:
        """Continue without the engines that fail the health check. Returns: their names."""
        checked = self.up
        answers = await asyncio.gather(*(replica.is_alive() for replica in checked))
        dead = [replica for replica, is_alive in zip(checked, answers, strict=True) if replica.is_up and not is_alive]
        for replica in dead:
            cause = "its process crashed, was killed or hangs"
            self.mark_dead(replica, f"{replica.name} is not responding: {cause} (log: {replica.log_path})")
        return [replica.name for replica in dead]

    async def drop_failed(self, error: RemoteFailed, before: int) -> str:
        """After a failed call, continue without the engines that died. Returns: their names.
        Args: before: `num_changes` when the call began. Raises: the error if no engine has died since.
        """
        dead = await self.drop_dead()
        if self.num_changes == before:
            raise error
        return ", ".join(dead) or "an engine that died or was admitted during the call"

    async def admit_replacements(self) -> None:
        """Count restarted engines as up; if no engine is up, wait for one.

        They hold the weights of the checkpoint, and receive requests after a weight sync (`resume`).
        Raises: RemoteFailed if no engine is left and none could be restarted.
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
                raise self._no_engine_left() from (failures[0] if failures else None)
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    def _no_engine_left(self) -> RemoteFailed:
        reasons = "; ".join(replica.death_cause for replica in self.replicas)
        limit = f"generator.max_engine_restarts={self.replicas[0].max_restarts}"
        return RemoteFailed(f"no engine is left ({limit}): {reasons}")

    def _begin_rescue(self) -> None:
        if self._rescue_task is None or self._rescue_task.done():
            self._rescue_task = self._background.begin(self._rescue())

    async def _rescue(self) -> None:
        """No engine is up: restore one, or fail the waiting requests."""
        try:
            while self.router.is_holding:
                if self.restore is None:
                    raise self._no_engine_left()
                await self.restore()
        except Exception as error:
            self.router.fail(error)

    async def prepare(self) -> None:
        """Let every engine do what is possible before its device is free."""
        calls = [replica.actor.call.remote("prepare", replica.settings) for replica in self.replicas]
        await self._calls.gather("prepare", calls)

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found suitable."""
        calls = [replica.actor.call.remote("start", replica.settings) for replica in self.replicas]
        for replica, started in zip(self.replicas, await self._calls.gather("start", calls), strict=True):
            replica.started = started

    def join_sender(self, info: ControlMessage) -> dict[str, Any]:
        """Connect every engine that is up to a sender of weights.
        Returns: name -> the running call, for `joined` and for the sender, which watches it while it connects.
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
        """Stop generating, drop every cached prefix and expect weights."""
        self.router.forget_routes()
        settings, timeout_s = self.replicas[0].settings, self._sync_timeout_s
        if settings.generator.pause_mode == "wait":
            timeout_s += settings.rpc_timeout_s
        self._updated = self.up
        await self._all("begin a weight update", "begin_weight_update", timeout_s=timeout_s)

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Have each engine generate with what it received, and route requests to all: to none that was admitted since
        and holds the checkpoint's weights. Raises: RemoteFailed if a received tensor differs from the one sent.
        """
        what = "finish a weight update"
        await self._all(what, "finish_and_resume", policy_version, digests, timeout_s=self._sync_timeout_s)
        self._route()

    async def resume(self) -> None:
        """Generate with the weights that the engines have."""
        await self._all("resume", "resume", timeout_s=self._sync_timeout_s)
        self._route()

    def _route(self) -> None:
        for replica in self.updated:
            replica.count_sync()
            self.router.add(replica.index)

    async def pause(self) -> None:
        """Freeze running requests until `resume`; new ones wait."""
        await self._each("pause", "pause", "keep", timeout_s=self._sync_timeout_s)

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights are restored from host memory if kept, else by the next update."""
        self.router.forget_routes()
        for replica in self.replicas:
            replica.freeze()
        await self._each("fall asleep", "sleep", keep_weights=keep_weights)

    async def wake_weights(self) -> None:
        await self._each("wake its weights", "wake_weights")

    async def wake_kv_cache(self) -> None:
        await self._each("wake its KV cache", "wake_kv_cache")
        for replica in self.replicas:
            replica.wake()

    async def memory(self) -> list[dict[str, float]]:
        """Memory of each engine's workers, as `device.memory_in_use`; without engines that do not report it."""
        calls = (replica.call("report its memory", "memory", timeout_s=MEMORY_S) for replica in self.up)
        results = await results_of(calls)
        return [worker for engine in results if not isinstance(engine, RemoteFailed) for worker in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Per engine and prompt, the logprob of each token given those before it; 0 for the first."""
        names = [replica.name for replica in self.updated]
        return dict(zip(names, await self._all("score prompts", "prompt_logprobs", prompts), strict=True))

    async def shutdown(self) -> None:
        """Shut the engines down; kill what is left of them."""
        await self.router.close()  # first: requests that fail by the shutdown would have their engine restarted
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
        """Call `method` on all that were updated. Raises: RemoteFailed for the first that fails, or if none is up."""
        up = self.updated
        if not up:
            raise self._no_engine_left()
        refs = [replica.actor.call.remote(method, *args) for replica in up]
        return await self._calls.gather(what, refs, [replica.index for replica in up], timeout_s)

    async def _each(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> None:
        """Like `_all`, but independent for each engine: those that die are dropped and the others continue.
        Raises: RemoteFailed if a living engine fails, or none is left.
        """
        called = self.up
        calls = (replica.call(what, method, *args, timeout_s=timeout_s, **kwargs) for replica in called)
        results = await results_of(calls)
        failed = [(replica, end) for replica, end in zip(called, results, strict=True) if isinstance(end, RemoteFailed)]
        for replica, error in failed:
            if replica.is_up and await replica.is_alive():
                raise error
            if replica.is_up:  # else a request has already noticed its death
                self.mark_dead(replica, str(error))
        if not self.up:
            raise self._no_engine_left() from (failed[0][1] if failed else None)
