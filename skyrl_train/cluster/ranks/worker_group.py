"""Actors that act as one: every call goes to all ranks, and the failure of one rank is the failure of the call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import Host, wait_ended_on_nodes
from skyrl_train.ranks import Rendezvous

CLOSE_S = 5
"""Timeout for processes that may hang in a collective."""
RANK = "skyrl_train.cluster.ranks.rank:Rank"
END_S = 60
"""Timeout for killed processes to free the memory of a device."""


class Place(NamedTuple):
    """Process of a rank."""

    node: str
    pid: int
    visible_devices: str


class WorkerGroup:
    """The ranks of one model."""

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
        self._places: list[Place] = []
        """Last known: a process that hangs cannot be asked."""
        self.spawn()

    def spawn(self) -> None:
        assert not self.actors
        actor = ray.remote(Host)
        self.actors = [
            actor.options(**slot.options()).remote(  # type: ignore[attr-defined]
                RANK, f"{self.calls.log_folder}/{rank_name}.log", visible
            )
            for slot, rank_name, visible in zip(self._slots, self.calls.names, self._visible_devices, strict=True)
        ]

    async def places(self, timeout_s: float | None = None) -> list[Place]:
        found = await self.calls.gather("start", self._call("find_place"), timeout_s=timeout_s)
        self._places = [Place(*place) for place in found]
        return self._places

    async def visible_devices(self) -> list[str]:
        return [place.visible_devices for place in await self.places()]

    def _call(self, method: str, *args: Any) -> list[Any]:
        return [actor.call.remote(method, *args) for actor in self.actors]

    async def end(self) -> None:
        """End the actors, dead or hanging ones too; return when their processes and device memory are gone.

        Processes of a dead node count as gone. Raises: RemoteFailed if one is still there after a minute.
        """
        await self.shutdown()
        pids: dict[str, list[int]] = {}
        for place in self._places:
            pids.setdefault(place.node, []).append(place.pid)
        if alive := await wait_ended_on_nodes(pids, END_S):
            raise RemoteFailed(f"processes {alive} did not end within {END_S} s of being killed")

    async def build(self, entry_point: str, kwargs: dict[str, Any]) -> list[Any]:
        """Make `module:Class` on every rank. Returns: each rank's position in the layout."""
        if self._custom_modules:  # a separate call, before arguments are unpickled that may refer to these modules
            await self.all("import_modules", self._custom_modules)
        on_one_node = len({place.node for place in await self.places()}) == 1
        address, port = await self.one(0, "listen", on_one_node)
        size = len(self._slots)
        meetings = [Rendezvous(rank, size, address, port, self.calls.timeout_s) for rank in range(size)]
        calls = zip(self.actors, meetings, strict=True)
        refs = [actor.call.remote("build", entry_point, meeting, kwargs) for actor, meeting in calls]
        return await self.calls.gather("start", refs)

    async def all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """`worker.method(*args)` on every rank with the same arguments. Args: timeout_s: like `Calls.gather`."""
        return await self.calls.gather(f"run {method}", self._call(method, *args), timeout_s=timeout_s)

    async def each(
        self,
        method: str,
        args_of_rank: Sequence[tuple[Any, ...]],
        kwargs_of_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """`worker.method(*args_of_rank[rank], **kwargs_of_rank[rank])` on every rank."""
        kwargs = [{}] * len(args_of_rank) if kwargs_of_rank is None else kwargs_of_rank
        calls = zip(self.actors, args_of_rank, kwargs, strict=True)
        refs = [actor.call.remote(method, *args, **own) for actor, args, own in calls]
        return await self.calls.gather(f"run {method}", refs)

    async def each_kept(self, method: str, args_of_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Like `each`, but results stay on the ranks. Returns: references to them, one per rank."""
        pairs = zip(self.actors, args_of_rank, strict=True)
        refs = [actor.call_and_keep.options(num_returns=2).remote(method, *args) for actor, args in pairs]
        await self.calls.gather(f"run {method}", [done for done, _ in refs])
        return [kept for _, kept in refs]

    async def one(self, rank: int, method: str, *args: Any) -> Any:
        """`worker.method(*args)`, or a method of Rank itself, on one rank."""
        return (await self.calls.gather(f"run {method}", [self.actors[rank].call.remote(method, *args)], [rank]))[0]

    async def shutdown(self) -> None:
        """Kill the actors, which first close what they have open if they still answer."""
        calls = [asyncio.wrap_future(ref.future()) for ref in self._call("close")]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_S)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
