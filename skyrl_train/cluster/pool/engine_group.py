"""The vLLM engines as the trainer sees them: what is asked of all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from skyrl_train.cluster.background import Background
from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.engine_members import EngineMembers
from skyrl_train.cluster.pool.engine_place import EnginePlace
from skyrl_train.cluster.pool.engine_requests import EngineRequests
from skyrl_train.engines.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.types import Generate
from skyrl_train.weight_sync.control import ControlMessage

SHUTDOWN_S = 15
"""Patience with engines that are asked to end."""
MEMORY_S = 10.0
"""Patience with an engine that is asked for its memory: a number of the log, not worth a wait."""
MARGIN_S = 10.0
"""By so much the driver waits longer for an engine than the engine for its core, so that it can say what was late."""


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
        places = [
            EnginePlace(index, self._calls, slot, one, max_restarts, visible)
            for index, (slot, one, visible) in enumerate(zip(slots, settings, devices, strict=True))
        ]
        self._background = Background()
        self.members = EngineMembers(places, self._background)
        self.requests = EngineRequests(self.members, self._background)

    @property
    def generate(self) -> Generate:
        """A request to an engine that is lost is sent to another; it waits while there is none."""
        return self.requests.router.generate

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines' HTTP endpoints, where they have them; known when they have started."""
        started = [place.started for place in self.members.up]
        return tuple(one.url for one in started if one is not None and one.url is not None)

    async def prepare(self) -> None:
        """Have every engine do what it can before its device is free."""
        await self._all("import vLLM", "prepare", [(place.settings,) for place in self.members.places])

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found fit."""
        started = await self._all("start", "start", [(place.settings,) for place in self.members.places])
        for place, one in zip(self.members.places, started, strict=True):
            place.started = one

    def join_sender(self, info: ControlMessage) -> dict[str, Any]:
        """Have every engine that is up join a sender of weights.

        Returns: name -> the call that does it; for `joined`, and for the sender, which waits for the engines meanwhile.
        """
        calls, offset = {}, 1
        for place in self.members.up:
            calls[place.name] = place.actor.init_weight_sync.remote(info | {"rank_offset": offset})
            offset += place.num_workers
        return calls

    async def joined(self, calls: dict[str, Any]) -> None:
        """Raises: RemoteFailed for the first that fails."""
        indices = [place.index for place in self.members.places if place.name in calls]
        await self._calls.gather("connect the weight sync", list(calls.values()), indices, self._sync_timeout_s)

    async def begin_weight_update(self) -> None:
        """Stop drawing tokens, forget every cached prefix and make ready for weights."""
        self.requests.router.forget_routes()
        settings, timeout_s = self.members.places[0].settings, self._sync_timeout_s
        if settings.pause_mode == "wait":
            timeout_s += settings.rpc_timeout_s
        await self._all("begin a weight update", "begin_weight_update", timeout_s=timeout_s)

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Raises: RemoteFailed if what an engine received is not what was sent, tensor by tensor."""
        args = [(policy_version, digests)] * len(self.members.up)
        await self._all("finish a weight update", "finish_weight_update", args, self._sync_timeout_s)

    async def resume(self) -> None:
        """From now on the engines that are up get requests."""
        await self._all("resume", "resume", timeout_s=self._sync_timeout_s)
        for place in self.members.up:
            place.survived_sync()
            self.requests.router.add(place.index)

    async def pause(self) -> None:
        """Stop serving: running requests are frozen and new ones wait, until `resume`."""
        await self._each("pause", "pause", "keep", timeout_s=self._sync_timeout_s)

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights come back from host memory if kept, else with the next update."""
        self.requests.router.forget_routes()
        await self._each("fall asleep", "sleep", keep_weights=keep_weights)

    async def wake_weights(self) -> None:
        await self._each("wake its weights", "wake_weights")

    async def wake_kv_cache(self) -> None:
        """Generation goes on."""
        await self._each("wake its KV cache", "wake_kv_cache")

    async def memory(self) -> list[dict[str, float]]:
        """What each engine's worker holds, as `device.memory_in_use`; without engines that do not say."""
        asked = (place.call("tell its memory", "memory", timeout_s=MEMORY_S) for place in self.members.up)
        return [held for engine in await _outcomes(asked) if not isinstance(engine, RemoteFailed) for held in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Per engine, per prompt, the logprob of each token given those before it; 0 for the first."""
        names = list(self.members.actors)
        scores = await self._all("score prompts", "prompt_logprobs", [(prompts,)] * len(names))
        return dict(zip(names, scores, strict=True))

    async def shutdown(self) -> None:
        """End the engines' processes; an engine that does not end by itself, or is dead already, is killed."""
        await self._background.end()
        calls = [asyncio.wrap_future(actor.shutdown.remote().future()) for actor in self.members.actors.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SHUTDOWN_S)
        for place in self.members.places:
            await place.end()

    @property
    def _sync_timeout_s(self) -> float:
        return self.members.places[0].settings.sync_timeout_s + MARGIN_S

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
        up = self.members.up
        if not up:
            raise self.members.none_is_left()
        each = args if args is not None else [()] * len(up)
        refs = [getattr(place.actor, method).remote(*one, **kwargs) for place, one in zip(up, each, strict=True)]
        return await self._calls.gather(what, refs, [place.index for place in up], timeout_s)

    async def _each(self, what: str, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> None:
        """As `_all`, but every engine for itself: those that die are dropped and the others go on.

        Raises: RemoteFailed if one fails that lives, or none is left.
        """
        asked = self.members.up
        outcomes = await _outcomes(place.call(what, method, *args, timeout_s=timeout_s, **kwargs) for place in asked)
        failed = [(place, one) for place, one in zip(asked, outcomes, strict=True) if isinstance(one, RemoteFailed)]
        for place, error in failed:
            if place.is_up and await place.lives():
                raise error
            if place.is_up:  # else a request has noticed its loss meanwhile
                self.members.lose(place, str(error))
        if not self.members.up:
            raise self.members.none_is_left() from (failed[0][1] if failed else None)


async def _outcomes(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """What each call returned, or the RemoteFailed that it raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RemoteFailed):
            raise outcome
    return outcomes
