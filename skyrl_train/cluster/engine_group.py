"""The vLLM engines as the trainer sees them: one that is lost is dropped, and another is started in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.engine_actor import EnginePlace
from skyrl_train.cluster.placement import Slot
from skyrl_train.inference.engine import EngineDeadError
from skyrl_train.inference.router import EngineLostError, Router
from skyrl_train.inference.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.types import Generate, Generation, SamplingParams
from skyrl_train.weight_sync.transport import ControlMessage

SHUTDOWN_S = 15
"""Patience with engines that are asked to end."""
PROBE_S = 30.0
"""Longest time after which a living engine says that it lives, also while it lets go of a sync that broke off."""
MARGIN_S = 10.0
"""By so much the driver waits longer for an engine than the engine for its core, so that it can say what was late."""

log = logging.getLogger(__name__)


class EngineGroup:
    """All engines, each of them holding the same weights."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: Sequence[EngineSettings | RemoteEngineSettings],
        log_folder: str,
        timeout_s: float,
        visible_devices: Sequence[str | None] | None = None,
        *,
        max_restarts: int = 0,
    ) -> None:
        """Asks Ray to start the engines' processes and returns at once; `start` has them load their models.

        Args: visible_devices of each engine, where they are not those that Ray gives it; max_restarts: replacements of
            an engine until it is given up, counted from 0 again when one serves.
        """
        names = tuple(f"engine-{index}" for index in range(len(settings)))
        self._calls = Calls(names, timeout_s, log_folder)
        self._max_restarts = max_restarts
        self._places = [
            EnginePlace(name, slot, one, f"{log_folder}/{name}.log", visible)
            for name, slot, one, visible in zip(
                names, slots, settings, visible_devices or [None] * len(slots), strict=True
            )
        ]
        self._router = Router([self._stream(index) for index in range(len(settings))])
        self._restore: Callable[[], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.membership = 0
        """Changes whenever an engine is lost or comes back: senders of weights then have to be connected anew."""

    @property
    def generate(self) -> Generate:
        """A request to an engine that is lost is sent to another; it waits while there is none."""
        return self._router.generate

    @property
    def actors(self) -> dict[str, Any]:
        """name -> actor of each engine that is up."""
        return {self._places[index].name: self._places[index].actor for index in self._up}

    @property
    def num_workers(self) -> int:
        """Of the engines that are up."""
        return sum(self._num_workers_of(index) for index in self._up)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines' HTTP endpoints, where they have them; known when they have started."""
        started = [self._places[index].started for index in self._up]
        return tuple(one.url for one in started if one is not None and one.url is not None)

    @property
    def _up(self) -> list[int]:
        return [index for index, place in enumerate(self._places) if place.is_up]

    def _num_workers_of(self, index: int) -> int:
        started = self._places[index].started
        assert started is not None, "call start first"
        return started.num_workers

    def when_all_are_lost(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Have `restore` called when the last engine is lost while it generates: it is to send a replacement weights
        (`admit_replacements`, a whole update, `resume`)."""
        self._restore = restore

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found fit."""
        started = await self._all("start", "start", [(place.settings,) for place in self._places])
        for place, one in zip(self._places, started, strict=True):
            place.started = one

    async def init_weight_sync(self, info: ControlMessage) -> None:
        infos, offset = [], 1
        for index in self._up:
            infos.append((info | {"rank_offset": offset},))
            offset += self._num_workers_of(index)
        await self._all("connect the weight sync", "init_weight_sync", infos, self._sync_timeout_s)

    async def begin_weight_update(self) -> None:
        """Stop drawing tokens, forget every cached prefix and make ready for weights."""
        self._router.forget_routes()
        waits_for_requests = self._places[0].settings.pause_mode == "wait"
        timeout_s = None if waits_for_requests else self._sync_timeout_s
        await self._all("begin a weight update", "begin_weight_update", timeout_s=timeout_s)

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Raises: RemoteFailed if what an engine received is not what was sent, tensor by tensor."""
        args = [(policy_version, digests)] * len(self._up)
        await self._all("finish a weight update", "finish_weight_update", args, self._sync_timeout_s)

    async def resume(self) -> None:
        """From now on the engines that are up get requests."""
        await self._all("resume", "resume", timeout_s=self._sync_timeout_s)
        for index in self._up:
            self._places[index].restarts = 0
            self._router.add(index)

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights come back from host memory if kept, else with the next update."""
        self._router.forget_routes()
        await self._all("fall asleep", "sleep", keep_weights=keep_weights)

    async def wake_weights(self) -> None:
        await self._all("wake its weights", "wake_weights")

    async def wake_kv_cache(self) -> None:
        """Generation goes on."""
        await self._all("wake its KV cache", "wake_kv_cache")

    async def memory(self) -> list[dict[str, float]]:
        """What each engine's worker holds, as `device.memory_in_use`."""
        return [worker for engine in await self._all("tell its memory", "memory") for worker in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Per engine, per prompt, the logprob of each token given those before it; 0 for the first."""
        names = list(self.actors)
        scores = await self._all("score prompts", "prompt_logprobs", [(prompts,)] * len(names))
        return dict(zip(names, scores, strict=True))

    async def drop_lost(self) -> list[str]:
        """Ask every engine whether it lives, and go on without those that do not. Returns: their names."""
        asked = self._up
        answers = await asyncio.gather(*(self._lives(index) for index in asked))
        lost = [index for index, lives in zip(asked, answers, strict=True) if not lives]
        for index in lost:
            file = f"log: {self._calls.log_folder}/{self._places[index].name}.log"
            self._lose(index, f"it does not answer, its process crashed, was killed or hangs ({file})")
        return [self._places[index].name for index in lost]

    async def admit_replacements(self) -> None:
        """Call also those engines that have been started in the place of lost ones; where none is left, wait for one.

        They hold the weights of the checkpoint, and get requests when a sync has ended with `resume`.
        Raises: RemoteFailed if no engine is left and none could be started.
        """
        while True:
            failures = [error for index in range(len(self._places)) if (error := self._admit(index)) is not None]
            for error in failures:
                log.error("%s", error)
            if self._up:
                return
            starting = [place.replacement for place in self._places if place.replacement is not None]
            if not starting:
                reasons = "; ".join(f"{place.name} is lost: {place.lost_because}" for place in self._places)
                raise RemoteFailed(
                    f"no engine is left (generator.max_engine_restarts={self._max_restarts}): {reasons}"
                ) from (failures[0] if failures else None)
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    async def shutdown(self) -> None:
        """End the engines' processes; an engine that does not end by itself, or is dead already, is killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        calls = [asyncio.wrap_future(actor.shutdown.remote().future()) for actor in self.actors.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SHUTDOWN_S)
        for place in self._places:
            await place.end()

    @property
    def _sync_timeout_s(self) -> float:
        return self._places[0].settings.sync_timeout_s + MARGIN_S

    async def _all(
        self,
        what: str,
        method: str,
        args: Sequence[tuple[Any, ...]] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """`engine.method(*args, **kwargs)` on every engine that is up; args are per engine."""
        up = self._up
        each = args if args is not None else [()] * len(up)
        refs = [
            getattr(self._places[index].actor, method).remote(*one, **kwargs)
            for index, one in zip(up, each, strict=True)
        ]
        return await self._calls.gather(what, refs, up, timeout_s)

    def _stream(self, index: int) -> Any:
        async def stream(
            requests: Sequence[tuple[int, list[int], SamplingParams]],
        ) -> AsyncIterator[list[tuple[int, Generation]]]:
            actor, name, timeout_s = self._places[index].actor, self._calls.names[index], self._calls.timeout_s
            try:
                results = actor.generate_batch.options(num_returns="streaming").remote(requests)
                while True:
                    ref = await asyncio.wait_for(anext(results), timeout_s)
                    yield await ref
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                message = f"{name} finished none of its requests within trainer.timeout_s={timeout_s:g} s"
                file = f"log: {self._calls.log_folder}/{name}.log"
                if self._places[index].actor is actor and await self._lives(index):
                    raise RemoteFailed(f"{message}: it lives, so responses take longer than that ({file})") from error
                raise self._lost_while_generating(index, actor, f"{message}: it hangs ({file})") from error
            except (RayTaskError, RayActorError) as error:
                message = self._calls.describe(name, "generate", error)
                if not _is_death(error):
                    raise RemoteFailed(message) from error
                raise self._lost_while_generating(index, actor, message) from error

        return stream

    async def _lives(self, index: int) -> bool:
        """Whether the engine's core answers."""
        place = self._places[index]
        patience_s = min(PROBE_S, place.settings.sync_timeout_s)
        answer = asyncio.wrap_future(place.actor.ping.remote(patience_s).future())
        try:
            await asyncio.wait_for(answer, patience_s + 1)
        except (RayError, TimeoutError):
            return False
        return True

    def _lost_while_generating(self, index: int, actor: Any, reason: str) -> EngineLostError:
        """For the router, which then sends the requests elsewhere."""
        if self._places[index].actor is actor and self._places[index].is_up:
            self._lose(index, reason)
            if not self._up:
                self._keep(self._rescue(reason))
        return EngineLostError(reason)

    def _lose(self, index: int, reason: str) -> None:
        place = self._places[index]
        place.is_up, place.lost_because = False, reason
        self.membership += 1
        self._router.remove(index)
        restarts = "it is replaced" if place.restarts < self._max_restarts else "it is not replaced any more"
        log.error("%s is lost: %s. %d of %d engines go on; %s", place.name, reason, len(self._up), len(self._places),
                  restarts)  # fmt: skip
        place.replacement = self._keep(self._replace(index))

    async def _replace(self, index: int) -> None:
        """End what is left of a lost engine and start another on its devices. Raises: RemoteFailed."""
        place = self._places[index]
        await place.end()
        while place.restarts < self._max_restarts:
            place.restarts += 1
            place.new_actor()
            try:
                (place.started,) = await self._calls.gather(
                    "start", [place.actor.start.remote(place.settings)], [index]
                )
                log.warning("%s was started anew; it serves from the next weight sync on", place.name)
                return
            except RemoteFailed as error:
                log.error("the replacement of a lost engine failed: %s", error)
                await place.end()
        raise RemoteFailed(
            f"{place.name} is given up (generator.max_engine_restarts={self._max_restarts}; log: "
            f"{self._calls.log_folder}/{place.name}.log)"
        )

    def _admit(self, index: int) -> BaseException | None:
        """Count a replacement that has started as up. Returns: why it could not be started."""
        place = self._places[index]
        if place.replacement is None or not place.replacement.done():
            return None
        task, place.replacement = place.replacement, None
        if task.cancelled():
            return None
        if task.exception() is None:
            place.is_up = True
            self.membership += 1
        return task.exception()

    async def _rescue(self, reason: str) -> None:
        """No engine is left to generate with: have one restored, or fail what is asked of them."""
        try:
            if self._restore is None:
                raise RemoteFailed(reason)
            await self._restore()
        except Exception as error:
            self._router.fail(error)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_death(error: BaseException) -> bool:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, (RayActorError, EngineDeadError))
