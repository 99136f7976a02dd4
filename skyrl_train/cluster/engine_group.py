"""The vLLM engines as the trainer sees them: one that is lost is dropped, and another is started in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.engine_place import EnginePlace
from skyrl_train.cluster.placement import Slot
from skyrl_train.inference.router import Router
from skyrl_train.inference.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.types import Generate
from skyrl_train.weight_sync.control import ControlMessage

SHUTDOWN_S = 15
"""Patience with engines that are asked to end."""
MEMORY_S = 10.0
"""Patience with an engine that is asked for its memory: a number of the log, not worth a wait."""
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
            an engine until it is given up, counted from 0 again when one has lived from one sync to the next.
        """
        names = tuple(f"engine-{index}" for index in range(len(settings)))
        self._calls = Calls(names, timeout_s, log_folder)
        devices = visible_devices or [None] * len(slots)
        self._places = [
            EnginePlace(index, self._calls, slot, one, max_restarts, visible)
            for index, (slot, one, visible) in enumerate(zip(slots, settings, devices, strict=True))
        ]
        self._router = Router([partial(place.generate, lose=self._lose) for place in self._places], self._begin_rescue)
        self._restore: Callable[[], Awaitable[None]] | None = None
        self._rescue_task: asyncio.Task[None] | None = None
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
        return {place.name: place.actor for place in self._up}

    @property
    def has_replacement(self) -> bool:
        """Whether the start of an engine in the place of a lost one has ended, well or not: `admit_replacements`."""
        return any(place.replacement is not None and place.replacement.done() for place in self._places)

    @property
    def num_workers(self) -> int:
        """Of the engines that are up."""
        return sum(place.num_workers for place in self._up)

    @property
    def shared_ranks(self) -> set[int]:
        """Policy ranks whose devices the engines that are up use, where they have none of their own."""
        return {rank for place in self._up for rank in place.slot.shares}

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines' HTTP endpoints, where they have them; known when they have started."""
        started = [place.started for place in self._up]
        return tuple(one.url for one in started if one is not None and one.url is not None)

    @property
    def _up(self) -> list[EnginePlace]:
        return [place for place in self._places if place.is_up]

    @property
    def are_waited_for(self) -> bool:
        """Whether a request waits because no engine serves."""
        return self._router.is_holding

    def when_all_are_lost(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Have `restore` called when a request finds no engine left: it is to send a replacement weights
        (`admit_replacements`, a whole update, `resume`)."""
        self._restore = restore

    async def prepare(self) -> None:
        """Have every engine do what it can before its device is free."""
        await self._all("import vLLM", "prepare", [(place.settings,) for place in self._places])

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found fit."""
        started = await self._all("start", "start", [(place.settings,) for place in self._places])
        for place, one in zip(self._places, started, strict=True):
            place.started = one

    def join_sender(self, info: ControlMessage) -> dict[str, Any]:
        """Have every engine that is up join a sender of weights.

        Returns: name -> the call that does it; for `joined`, and for the sender, which waits for the engines meanwhile.
        """
        calls, offset = {}, 1
        for place in self._up:
            calls[place.name] = place.actor.init_weight_sync.remote(info | {"rank_offset": offset})
            offset += place.num_workers
        return calls

    async def joined(self, calls: dict[str, Any]) -> None:
        """Raises: RemoteFailed for the first that fails."""
        indices = [place.index for place in self._places if place.name in calls]
        await self._calls.gather("connect the weight sync", list(calls.values()), indices, self._sync_timeout_s)

    async def begin_weight_update(self) -> None:
        """Stop drawing tokens, forget every cached prefix and make ready for weights."""
        self._router.forget_routes()
        settings, timeout_s = self._places[0].settings, self._sync_timeout_s
        if settings.pause_mode == "wait":
            timeout_s += settings.rpc_timeout_s
        await self._all("begin a weight update", "begin_weight_update", timeout_s=timeout_s)

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Raises: RemoteFailed if what an engine received is not what was sent, tensor by tensor."""
        args = [(policy_version, digests)] * len(self._up)
        await self._all("finish a weight update", "finish_weight_update", args, self._sync_timeout_s)

    async def resume(self) -> None:
        """From now on the engines that are up get requests."""
        await self._all("resume", "resume", timeout_s=self._sync_timeout_s)
        for place in self._up:
            place.survived_sync()
            self._router.add(place.index)

    async def pause(self) -> None:
        """Stop serving: running requests are frozen and new ones wait, until `resume`."""
        await self._each("pause", "pause", "keep", timeout_s=self._sync_timeout_s)

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights come back from host memory if kept, else with the next update."""
        self._router.forget_routes()
        await self._each("fall asleep", "sleep", keep_weights=keep_weights)

    async def wake_weights(self) -> None:
        await self._each("wake its weights", "wake_weights")

    async def wake_kv_cache(self) -> None:
        """Generation goes on."""
        await self._each("wake its KV cache", "wake_kv_cache")

    async def memory(self) -> list[dict[str, float]]:
        """What each engine's worker holds, as `device.memory_in_use`; without engines that do not say."""
        asked = (place.call("tell its memory", "memory", timeout_s=MEMORY_S) for place in self._up)
        return [held for engine in await _outcomes(asked) if not isinstance(engine, RemoteFailed) for held in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Per engine, per prompt, the logprob of each token given those before it; 0 for the first."""
        names = list(self.actors)
        scores = await self._all("score prompts", "prompt_logprobs", [(prompts,)] * len(names))
        return dict(zip(names, scores, strict=True))

    async def drop_lost(self) -> list[str]:
        """Ask every engine whether it lives, and go on without those that do not. Returns: their names."""
        asked = self._up
        answers = await asyncio.gather(*(place.lives() for place in asked))
        lost = [place for place, lives in zip(asked, answers, strict=True) if place.is_up and not lives]
        for place in lost:
            self._lose(place, f"it does not answer, its process crashed, was killed or hangs (log: {place.log_path})")
        return [place.name for place in lost]

    async def admit_replacements(self) -> None:
        """Call also those engines that have been started in the place of lost ones; where none is left, wait for one.

        They hold the weights of the checkpoint, and get requests when a sync has ended with `resume`.
        Raises: RemoteFailed if no engine is left and none could be started.
        """
        while True:
            failures = [error for place in self._places if (error := self._admit(place)) is not None]
            for error in failures:
                log.error("%s", error)
            if self._up:
                return
            starting = [place.replacement for place in self._places if place.replacement is not None]
            if not starting:
                raise RemoteFailed(self._none_is_left()) from (failures[0] if failures else None)
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
        """`engine.method(*args, **kwargs)` on every engine that is up; args are per engine.

        Raises: RemoteFailed for the first that fails, or if none is up.
        """
        up = self._up
        if not up:
            raise RemoteFailed(self._none_is_left())
        each = args if args is not None else [()] * len(up)
        refs = [getattr(place.actor, method).remote(*one, **kwargs) for place, one in zip(up, each, strict=True)]
        return await self._calls.gather(what, refs, [place.index for place in up], timeout_s)

    async def _each(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> None:
        """As `_all`, but every engine for itself: those that die are dropped and the others go on.

        Raises: RemoteFailed if one fails that lives, or none is left.
        """
        asked = self._up
        outcomes = await _outcomes(place.call(what, method, *args, timeout_s=timeout_s, **kwargs) for place in asked)
        failed = [(place, one) for place, one in zip(asked, outcomes, strict=True) if isinstance(one, RemoteFailed)]
        for place, error in failed:
            if place.is_up and await place.lives():
                raise error
            if place.is_up:  # else a request has noticed its loss meanwhile
                self._lose(place, str(error))
        if not self._up:
            raise RemoteFailed(self._none_is_left()) from (failed[0][1] if failed else None)

    def _none_is_left(self) -> str:
        reasons = "; ".join(f"{place.name} is lost: {place.lost_because}" for place in self._places)
        return f"no engine is left (generator.max_engine_restarts={self._places[0].max_restarts}): {reasons}"

    def _lose(self, place: EnginePlace, reason: str) -> None:
        place.is_up, place.lost_because = False, reason
        self.membership += 1
        self._router.remove(place.index)
        restarts = "it is replaced" if place.restarts < place.max_restarts else "it is not replaced any more"
        log.error("%s is lost: %s. %d of %d engines go on; %s", place.name, reason, len(self._up), len(self._places),
                  restarts)  # fmt: skip
        place.replacement = self._keep(place.replace())

    def _admit(self, place: EnginePlace) -> BaseException | None:
        """Count a replacement that has started as up. Returns: why it could not be started."""
        if place.replacement is None or not place.replacement.done():
            return None
        task, place.replacement = place.replacement, None
        if task.cancelled():
            return None
        if task.exception() is None:
            place.is_up = True
            self.membership += 1
        return task.exception()

    def _begin_rescue(self) -> None:
        if self._rescue_task is None or self._rescue_task.done():
            self._rescue_task = self._keep(self._rescue())

    async def _rescue(self) -> None:
        """No engine is left to generate with: have one restored, or fail what is asked of them."""
        try:
            while self._router.is_holding:
                if self._restore is None:
                    raise RemoteFailed(self._none_is_left())
                await self._restore()
        except Exception as error:
            self._router.fail(error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told by `admit_replacements`; asyncio complains of those that it never asked for


async def _outcomes(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What each call returned, or the RemoteFailed that it raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RemoteFailed):
            raise outcome
    return outcomes
