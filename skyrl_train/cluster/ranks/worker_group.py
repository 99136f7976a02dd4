"""Actors that act as one: every call goes to all ranks, and the failure of one rank is the failure of the call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.host import Host
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import wait_ended_on_nodes
from skyrl_train.ranks import Rendezvous
from skyrl_train.stores import LOOPBACK

CLOSE_S = 5
"""Patience with processes that may hang in a collective."""
IDLE_S = 20
"""Longest time after which a rank answers that has nothing to do."""
RANK = "skyrl_train.cluster.ranks.rank:Rank"
END_S = 60
"""Patience with killed processes that give back the memory of a device."""


def _words(method: str) -> str:
    """For messages: "failed to keep old logprobs"."""
    return method.replace("_", " ") if "_" in method or method == "update" else f"compute {method}"


class WorkerGroup:
    """The ranks of the policy or of the reference."""

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        log_folder: str,
        timeout_s: float,
        visible_devices: Sequence[str | None] | None = None,
        custom_modules: Sequence[str] = (),
    ) -> None:
        """Ask Ray to start the actors and return at once.

        Args: visible_devices: CUDA_VISIBLE_DEVICES of each rank that differs from Ray's; custom_modules: imported by
            every rank before anything else.
        """
        names = tuple(f"{name}-{rank}" for rank in range(len(slots)))
        self.calls = Calls(names, timeout_s, log_folder)
        self._slots = tuple(slots)
        self._visible_devices = visible_devices or [None] * len(slots)
        self._custom_modules = tuple(custom_modules)
        self.actors: list[Any] = []
        self._places: list[tuple[str, int, str]] = []
        """As they were last found: a process that hangs cannot be asked."""
        self.spawn()

    def spawn(self) -> None:
        """Ask Ray to start the actors, which are not there or were ended."""
        assert not self.actors
        actor = ray.remote(Host)
        self.actors = [
            actor.options(**slot.options()).remote(  # type: ignore[attr-defined]
                RANK, f"{self.calls.log_folder}/{rank_name}.log", visible
            )
            for slot, rank_name, visible in zip(self._slots, self.calls.names, self._visible_devices, strict=True)
        ]

    async def visible_devices(self) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each rank."""
        return [visible for _, _, visible in await self._find_places()]

    async def _find_places(self) -> list[tuple[str, int, str]]:
        self._places = await self.calls.gather("start", [actor.call.remote("find_place") for actor in self.actors])
        return self._places

    async def end(self) -> None:
        """End the actors, also those that are dead or hang; returns when their processes, and with them their memory on
        the devices, are gone. What ran on a node that is lost is gone.

        Raises: RemoteFailed if one is still there after a minute.
        """
        await self.shutdown()
        pids: dict[str, list[int]] = {}
        for node, pid, _ in self._places:
            pids.setdefault(node, []).append(pid)
        tasks_on = {place[0]: slot.strategy for slot, place in zip(self._slots, self._places, strict=False)}
        if alive := await wait_ended_on_nodes(pids, tasks_on, END_S):
            raise RemoteFailed(f"processes {alive} did not end within {END_S} s of being killed")

    async def memory(self) -> list[dict[str, float]]:
        """What each rank holds, as `device.memory_in_use`; empty while the actors are ended."""
        if not self.actors:
            return []
        return await self.calls.gather("tell its memory", [actor.call.remote("memory") for actor in self.actors])

    async def is_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Whether every rank answers by then. One that is at work, or waits in a collective, does not."""
        try:
            await self.calls.gather(
                "answer", [actor.call.remote("find_place") for actor in self.actors], timeout_s=timeout_s
            )
        except RemoteFailed:
            return False
        return True

    @property
    def size(self) -> int:
        return len(self._slots)

    async def build(self, entry_point: str, kwargs: dict[str, Any]) -> list[Any]:
        """Make `module:Class` on every rank. Returns: each rank's position in the layout."""
        if self._custom_modules:  # a call of its own, before arguments are unpickled that may refer to these modules
            await self.all("import_modules", self._custom_modules)
        address, port = await self.one(0, "find_meeting_place")
        if len({node for node, _, _ in await self._find_places()}) == 1:
            address = LOOPBACK
        meetings = [Rendezvous(rank, self.size, address, port, self.calls.timeout_s) for rank in range(self.size)]
        return await self.calls.gather(
            "start",
            [
                actor.call.remote("build", entry_point, meeting, kwargs)
                for actor, meeting in zip(self.actors, meetings, strict=True)
            ],
        )

    async def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`worker.method(*args)` on every rank with the same arguments."""
        return await self.calls.gather(
            _words(method), [actor.call.remote(method, *args, **kwargs) for actor in self.actors]
        )

    async def each(
        self,
        method: str,
        args_of_rank: Sequence[tuple[Any, ...]],
        kwargs_of_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """`worker.method(*args_of_rank[rank], **kwargs_of_rank[rank])` on every rank."""
        kwargs = [{}] * len(args_of_rank) if kwargs_of_rank is None else kwargs_of_rank
        calls = zip(self.actors, args_of_rank, kwargs, strict=True)
        return await self.calls.gather(
            _words(method), [actor.call.remote(method, *args, **own) for actor, args, own in calls]
        )

    async def each_kept(self, method: str, args_of_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `each`, but the results stay where they are: references to them, one per rank."""
        pairs = zip(self.actors, args_of_rank, strict=True)
        refs = [actor.call_and_keep.options(num_returns=2).remote(method, *args) for actor, args in pairs]
        await self.calls.gather(_words(method), [done for done, _ in refs])
        return [kept for _, kept in refs]

    async def one(self, rank: int, method: str, *args: Any) -> Any:
        """`worker.method(*args)`, or a method of Rank itself, on one rank."""
        return (await self.calls.gather(_words(method), [self.actors[rank].call.remote(method, *args)], [rank]))[0]

    async def shutdown(self) -> None:
        """Kill the actors, which first close what they have open if they still answer."""
        calls = [asyncio.wrap_future(actor.call.remote("close").future()) for actor in self.actors]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_S)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
