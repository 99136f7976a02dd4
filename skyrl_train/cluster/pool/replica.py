"""One engine and those that replace it: whether it lives, how it is ended and another started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.host import AsyncHost
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.engine_process import GONE_S, Started, kill_on_node
from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.rollout.router import EngineLostError, Request
from skyrl_train.types import Generation

# Requests in flight come as a handful of batches; the rest are control calls that must never queue behind them.
MAX_CONCURRENCY = 1000
ENGINE_PROCESS = "skyrl_train.cluster.pool.engine_process:EngineProcess"
PROBE_S = 30.0
"""Longest time after which a living engine says that it lives, also while it lets go of a sync that broke off."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineReplica:
    """An engine, and after it has died another one on the same devices."""

    index: int
    """Among `calls.names`."""
    calls: Calls
    slot: Slot
    settings: EngineSettings
    max_restarts: int
    """Replacements in a row until the replica is given up."""
    visible_devices: str | None = None
    """None: those that Ray gives it."""
    actor: Any = field(init=False)
    started: Started | None = None
    """None until the engine has loaded its model."""
    is_up: bool = True
    """The engine is called and sent weights; False from its loss until a replacement has started."""
    lost_because: str = ""
    restarts: int = 0
    """Replacements since an engine of this replica last lived from one weight sync to the next."""
    syncs: int = 0
    """Weight syncs that the engine has been through."""
    replacement: asyncio.Task[None] | None = None

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
        """Asks Ray for a process and returns at once."""
        self.actor = (
            ray.remote(AsyncHost)
            .options(  # type: ignore[attr-defined]
                **self.slot.options(),
                max_concurrency=MAX_CONCURRENCY,
            )
            .remote(ENGINE_PROCESS, self.log_path, self.visible_devices)
        )

    async def call(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """`engine.method(*args, **kwargs)`. Raises: RemoteFailed."""
        ref = self.actor.call.remote(method, *args, **kwargs)
        return (await self.calls.gather(what, [ref], [self.index], timeout_s))[0]

    async def generate(
        self, requests: list[Request], lose: Callable[[EngineReplica, str], None]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Answers as they come. Args: lose is told once of an engine that died or hangs, and why.

        Raises: EngineLostError, after `lose`; RemoteFailed if a request fails of which the engine did not die, or takes
            longer than the deadline.
        """
        actor, timeout_s = self.actor, self.calls.timeout_s
        cause: Exception
        try:
            results = actor.stream.options(num_returns="streaming").remote("generate_batch", requests)
            while True:
                ref = await asyncio.wait_for(anext(results), timeout_s)
                yield await ref
        except StopAsyncIteration:
            return
        except RayError as error:  # first, for what an engine raises may be a TimeoutError too
            message = self.calls.describe(self.name, "generate", error)
            if not _is_death(error) and self.actor is actor and await self.lives():
                raise RemoteFailed(message) from error
            reason, cause = message, error
        except TimeoutError as error:
            message = f"{self.name} finished none of its requests within trainer.timeout_s={timeout_s:g} s"
            if self.actor is actor and await self.lives():
                raise RemoteFailed(
                    f"{message}: it lives, so responses take longer than that (log: {self.log_path})"
                ) from error
            reason, cause = f"{message}: it hangs (log: {self.log_path})", error
        if self.actor is actor and self.is_up:
            lose(self, reason)
        raise EngineLostError(reason) from cause

    async def lives(self) -> bool:
        """Whether the engine's core answers."""
        patience_s = min(PROBE_S, self.settings.generator.weight_sync_timeout_s)
        answer = asyncio.wrap_future(self.actor.call.remote("ping", patience_s).future())
        try:
            await asyncio.wait_for(answer, patience_s + 1)
        except (RayError, TimeoutError):
            return False
        return True

    def survived_sync(self) -> None:
        """Right after a sync nothing is known of an engine but that it took the weights in: only the next one shows
        that it could work with them, and that it was no request of the last step that its predecessors died of."""
        self.syncs += 1
        if self.syncs > 1:
            self.restarts = 0

    async def replace(self) -> None:
        """End what is left of a lost engine and start another on its devices. Raises: RemoteFailed."""
        await self.end()
        while self.restarts < self.max_restarts:
            self.restarts += 1
            self.new_actor()
            try:
                self.started = await self.call("start", "start", self.settings, waits_for_weights=True)
                self.syncs = 0
                log.warning("%s was started anew; it serves from the next weight sync on", self.name)
                return
            except RemoteFailed as error:
                log.error("the replacement of a lost engine failed: %s", error)
                await self.end()
        raise RemoteFailed(
            f"{self.name} is given up (generator.max_engine_restarts={self.max_restarts}; log: {self.log_path})"
        )

    def admit(self) -> BaseException | None:
        """Count a replacement that has started as up. Returns: why it could not be started."""
        if self.replacement is None or not self.replacement.done():
            return None
        task, self.replacement = self.replacement, None
        if task.cancelled():
            return None
        self.is_up |= task.exception() is None
        return task.exception()

    async def end(self) -> None:
        """Kill the engine, also where it is stopped, and what it started: they hold the memory of its devices."""
        started, self.started = self.started, None
        ray.kill(self.actor)
        if started is not None:
            with contextlib.suppress(RayError, TimeoutError):  # its node may be lost as well
                await asyncio.wait_for(kill_on_node(started), 2 * GONE_S)


def _is_death(error: RayError) -> bool:
    """Plainly; of other errors the engine is asked."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, (RayActorError, EngineDeadError))
