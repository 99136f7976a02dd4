"""One engine and its replacements: health check, shutdown and restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.engine_process import GONE_S, TRACKER_S, StartedEngine, kill_on_node
from skyrl_train.cluster.pool.router import EngineLostError, Request
from skyrl_train.cluster.process import AsyncHost
from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.types import Generation

MAX_CONCURRENCY = 20_000
"""Concurrent calls: every stream of requests is one until it ends, and control calls must never queue behind them."""
ENGINE_PROCESS = "skyrl_train.cluster.pool.engine_process:EngineProcess"
KILL_S = 2 * GONE_S + TRACKER_S
"""Timeout in seconds for an engine's processes to end after they were killed."""
PROBE_S = 30.0
"""Timeout in seconds of a health check, which an engine passes even while it closes a failed sync."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineReplica:
    """An engine, and after its death the next one on the same devices."""

    index: int
    """Index in `calls.names`."""
    calls: Calls
    slot: Slot
    settings: EngineSettings
    max_restarts: int
    """Maximum number of consecutive restarts."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES; None: set by Ray."""
    actor: Any = field(init=False)
    started: StartedEngine | None = None
    """None until the engine has loaded its model."""
    is_up: bool = True
    """The engine receives calls and weights; False from its death until a replacement has started."""
    death_cause: str = ""
    restarts: int = 0
    """Restarts since an engine of this replica last survived from one weight sync to the next."""
    syncs: int = 0
    """Weight syncs of the current engine."""
    replacement: asyncio.Task[None] | None = None
    is_asleep: bool = False
    """Another phase has the devices, and running requests are frozen."""
    _progress_s: float = 0.0
    """The event loop's time at which the engine last answered any batch, or woke."""

    def __post_init__(self) -> None:
        self.new_actor()

    @property
    def name(self) -> str:
        return self.calls.names[self.index]

    @property
    def log_path(self) -> str:
        return f"{self.calls.log_folder}/{self.name}.log"

    @property
    def num_workers(self) -> int:
        assert self.started is not None, "call start first"
        return self.started.facts.num_workers

    def new_actor(self) -> None:
        """Request a process from Ray and return at once."""
        actor: Any = ray.remote(AsyncHost)
        options = self.slot.options() | {"max_concurrency": MAX_CONCURRENCY}
        self.actor = actor.options(**options).remote(ENGINE_PROCESS, self.log_path, self.visible_devices, self.log_path)

    async def call(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """`engine.method(*args, **kwargs)`. Raises: RemoteFailed."""
        ref = self.actor.call.remote(method, *args, **kwargs)
        return (await self.calls.gather(what, [ref], [self.index], timeout_s))[0]

    async def generate(
        self, requests: list[Request], mark_dead: Callable[[EngineReplica, str], None]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Yield answers as requests finish; if the caller stops iterating, the others are aborted.

        Args: mark_dead: called once for an engine that died or hangs.
        Raises: EngineLostError, after `mark_dead`; RemoteFailed if a request of a living engine fails or times out.
        """
        actor, timeout_s = self.actor, self.calls.timeout_s
        cause: Exception
        results = actor.stream.options(num_returns="streaming").remote("generate_batch", requests)
        try:
            while True:
                ref = await self._next(results)
                yield await ref
        except StopAsyncIteration:
            return
        except (asyncio.CancelledError, GeneratorExit):
            if ray.is_initialized():  # else this would start a cluster
                ray.cancel(results)  # Ray (2.60) lets a stream that nobody reads run on
            raise
        except RayError as error:  # first, because an engine's own error may be a TimeoutError too
            message = self.calls.describe(self.name, "generate", error)
            own = error.cause if isinstance(error, RayTaskError) else error
            is_death = isinstance(own, RayActorError | EngineDeadError)
            if not is_death and self.actor is actor and await self.is_alive():
                raise RemoteFailed(message) from error
            reason, cause = message, error
        except TimeoutError as error:
            message = f"{self.name} finished none of its requests within trainer.timeout_s={timeout_s:g} s"
            if self.actor is actor and await self.is_alive():
                raise RemoteFailed(
                    f"{message}: the engine is alive, but its responses take longer (log: {self.log_path})"
                ) from error
            reason, cause = f"{message}: it hangs (log: {self.log_path})", error
        if self.actor is actor and self.is_up:
            mark_dead(self, reason)
        raise EngineLostError(reason) from cause

    async def _next(self, results: Any) -> Any:
        """The next answer of a stream. Raises: TimeoutError if the engine answers no stream in time while it is awake:
        a batch may wait behind others for longer.
        """
        time, timeout_s = asyncio.get_running_loop().time, self.calls.timeout_s
        sent_s, waiting = time(), asyncio.ensure_future(anext(results))
        try:
            while not waiting.done():
                silent_s = 0.0 if self.is_asleep else time() - max(sent_s, self._progress_s)
                if silent_s >= timeout_s:
                    raise TimeoutError
                await asyncio.wait({waiting}, timeout=timeout_s - silent_s)
        finally:
            waiting.cancel()
        answer = waiting.result()
        self._progress_s = time()
        return answer

    def freeze(self) -> None:
        """Note that the engine sleeps and its requests wait: their time does not count."""
        self.is_asleep = True

    def wake(self) -> None:
        """Note that requests run again, with all of their time."""
        self.is_asleep, self._progress_s = False, asyncio.get_running_loop().time()

    async def is_alive(self) -> bool:
        """Health check: whether the engine's core answers."""
        timeout_s = min(PROBE_S, self.settings.generator.weight_sync_timeout_s)
        answer = asyncio.wrap_future(self.actor.call.remote("ping", timeout_s).future())
        try:
            await asyncio.wait_for(answer, timeout_s + 1)
        except (RayError, TimeoutError):
            return False
        return True

    def count_sync(self) -> None:
        """One completed sync, or batch of a teacher, does not prove an engine healthy; the second one does, and resets
        its restarts: it has worked with the weights, and survived what its predecessors may have died of.
        """
        self.syncs += 1
        if self.syncs > 1:
            self.restarts = 0

    async def replace(self) -> None:
        """Kill what is left of a dead engine and start another on its devices. Raises: RemoteFailed."""
        await self.end()
        while self.restarts < self.max_restarts:
            self.restarts += 1
            self.new_actor()
            try:
                self.started = await self.call("start", "start", self.settings, waits_for_weights=True)
                self.syncs = 0
                log.warning("%s was restarted; it serves again after the next weight sync", self.name)
                return
            except RemoteFailed as error:
                log.error("restarting %s failed: %s", self.name, error)
                await self.end()
        raise RemoteFailed(
            f"{self.name} reached its limit of restarts (generator.max_engine_restarts={self.max_restarts}; "
            f"log: {self.log_path})"
        )

    def admit(self) -> BaseException | None:
        """Set `is_up` if a replacement has started. Returns: the error if it could not be started."""
        if self.replacement is None or not self.replacement.done():
            return None
        task, self.replacement = self.replacement, None
        if task.cancelled():
            return None
        self.is_up |= task.exception() is None
        return task.exception()

    async def end(self) -> None:
        """Kill the engine, even if it is stopped, and its processes, which hold the memory of its devices."""
        started, self.started = self.started, None
        ray.kill(self.actor)
        if started is None:
            return
        try:
            await asyncio.wait_for(kill_on_node(started), KILL_S)
        except RayError:
            pass  # its node died as well
        except TimeoutError:
            log.warning("processes of %s, which may hold memory, did not end within %g s", self.name, KILL_S)
