"""Actors that act as one: every call goes to all ranks, and the failure of one rank is the failure of the call."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import host, log_to, talk_through_node_address, use_devices, wait_ended_on_nodes
from skyrl_train.device import memory_in_use
from skyrl_train.inference.stock_nccl import StockNcclSender
from skyrl_train.ranks import Rendezvous, free_port
from skyrl_train.weight_sync.errors import WeightSyncError
from skyrl_train.weight_sync.transport import ControlMessage, Sender, SendReport

Reach = Literal["own_stage", "first_stage", "every_stage"]
CLOSE_S = 5
"""Patience with processes that may hang in a collective."""
IDLE_S = 20
"""Longest time after which a rank answers that has nothing to do."""
END_S = 60
"""Patience with killed processes that give back the memory of a device."""


class RankActor:
    """One process of a group; holds a plain worker object and makes the calls that need Ray for it."""

    def __init__(self, name: str, log_path: str, visible_devices: str | None) -> None:
        use_devices(visible_devices)
        log_to(log_path)
        talk_through_node_address()
        import torch

        torch.set_num_threads(1)
        self._name = name
        self._sender: Sender | StockNcclSender | None = None
        self._worker: Any = None

    def find_place(self) -> tuple[str, int, str]:
        """(node, process id, visible devices)"""
        return ray.get_runtime_context().get_node_id(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def memory(self) -> dict[str, float]:
        return memory_in_use()

    def find_meeting_place(self) -> tuple[str, int]:
        return host(), free_port()

    def build(self, entry_point: str, rendezvous: Rendezvous, kwargs: dict[str, Any]) -> Any:
        """Make the worker `module:Class` and return its place in the layout."""
        module, name = entry_point.split(":")
        self._worker = getattr(importlib.import_module(module), name)(rendezvous, **kwargs)
        return self._worker.ranks

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def call_and_keep(self, method: str, *args: Any) -> tuple[None, Any]:
        """As `call`; the driver waits for the first result and hands on a reference to the second."""
        return None, self.call(method, *args)

    def open_sender(
        self, engines: Mapping[str, Any], backend: str, bucket_bytes: int, num_workers: int, timeout_s: float, name: str
    ) -> ControlMessage:
        """Make this rank a sender of weights and return what the engines (name -> actor) must be told.

        Args: engines: to whom this rank posts its messages; num_workers: of all engines; name: of the sender.
        """
        from skyrl_train.device import device
        from skyrl_train.weight_sync.channels import send_channel

        if self._sender is not None:
            self._sender.close()

        def post(message: ControlMessage) -> PostedCalls:
            message = message | {"sender": name}
            calls = {engine.update_weights.remote(message): engine_name for engine_name, engine in engines.items()}
            return PostedCalls(calls, timeout_s)

        if backend == "vllm_nccl":
            self._sender = StockNcclSender(bucket_bytes, post, num_workers, device(), timeout_s, host())
        else:
            channel = send_channel(backend, num_workers, device(), timeout_s, host())
            self._sender = Sender(channel, bucket_bytes, post)
        return self._sender.init_info | {"sender": name, "timeout_s": timeout_s}

    def close(self) -> None:
        """Before the end of the process: leave nothing behind that outlives it."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def connect_sender(self) -> None:
        """Wait until every receiver has joined."""
        assert self._sender is not None
        self._sender.connect()

    def close_sender(self) -> None:
        """Let the receivers of a sync that broke off go; `open_sender` opens another."""
        if self._sender is not None:
            self._sender.close()

    def send_weights(self, dtype_name: str, reach: Reach) -> SendReport | None:
        """Export this stage's weights; every rank of the stage takes part, its owner sends and reports.

        The export runs to its end also where sending fails: the other ranks of the stage wait for this one in it.

        Args: reach: where the tensors of a stage are sent from: its own owner, the first stage's, or every rank.
        """
        import torch

        dtype = getattr(torch, dtype_name)
        if reach == "first_stage":
            specs, tensors = self._worker.export_to_first_stage(dtype)
        elif reach == "every_stage":
            specs, tensors = self._worker.export_to_every_stage(dtype)
        else:
            specs, tensors = self._worker.export_specs(dtype), self._worker.export(dtype)
        try:
            return None if self._sender is None else self._sender.send(specs, tensors)
        finally:
            for _ in tensors:
                pass


class PostedCalls:
    """Calls to several engines that run, as a sender of weights waits for them."""

    def __init__(self, calls: dict[Any, str], timeout_s: float) -> None:
        """Args: calls: reference to the result -> name of the engine."""
        self._calls, self._timeout_s = calls, timeout_s

    def check(self) -> None:
        self._raise_errors(0.0)

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while late := self._raise_errors(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{', '.join(late)} did not take in the weights within {self._timeout_s:g} s")

    def _raise_errors(self, timeout_s: float) -> list[str]:
        """Returns: the engines that are still at work after that time."""
        done, running = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=timeout_s)
        for call in done:
            try:
                ray.get(call)
            except RayActorError as error:
                raise WeightSyncError(f"{self._calls[call]} died while it took in the weights") from error
            except RayTaskError as error:
                raise WeightSyncError(
                    f"{self._calls[call]} could not take in the weights: {type(error.cause).__name__}: {error.cause}"
                ) from error
        return [self._calls[call] for call in running]


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
    ) -> None:
        """Asks Ray to start the actors and returns at once.

        Args: visible_devices of each rank, where they are not those that Ray gives it.
        """
        names = tuple(f"{name}-{rank}" for rank in range(len(slots)))
        self.calls = Calls(names, timeout_s, log_folder)
        self._slots = tuple(slots)
        self._visible_devices = visible_devices or [None] * len(slots)
        self.actors: list[Any] = []
        self._places: list[tuple[str, int, str]] = []
        """As they were last found: a process that hangs cannot be asked."""
        self.spawn()

    def spawn(self) -> None:
        """Ask Ray to start the actors, which are not there or were ended."""
        assert not self.actors
        actor = ray.remote(RankActor)
        self.actors = [
            actor.options(**slot.options()).remote(  # type: ignore[attr-defined]
                rank_name, f"{self.calls.log_folder}/{rank_name}.log", visible
            )
            for slot, rank_name, visible in zip(self._slots, self.calls.names, self._visible_devices, strict=True)
        ]

    async def visible_devices(self) -> list[str]:
        """CUDA_VISIBLE_DEVICES of each rank."""
        return [visible for _, _, visible in await self._find_places()]

    async def _find_places(self) -> list[tuple[str, int, str]]:
        self._places = await self.calls.gather("start", [actor.find_place.remote() for actor in self.actors])
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
        return await self.calls.gather("tell its memory", [actor.memory.remote() for actor in self.actors])

    async def is_idle(self) -> bool:
        """Whether every rank answers. One that is at work, or waits in a collective, does not."""
        try:
            await self.calls.gather("answer", [actor.find_place.remote() for actor in self.actors], timeout_s=IDLE_S)
        except RemoteFailed:
            return False
        return True

    @property
    def size(self) -> int:
        return len(self._slots)

    async def build(self, entry_point: str, kwargs: dict[str, Any]) -> list[Any]:
        """Make `module:Class` on every rank; returns each rank's place in the layout."""
        address, port = await self.one(0, "find_meeting_place")
        await self._find_places()
        meetings = [Rendezvous(rank, self.size, address, port, self.calls.timeout_s) for rank in range(self.size)]
        return await self.calls.gather(
            "start",
            [
                actor.build.remote(entry_point, meeting, kwargs)
                for actor, meeting in zip(self.actors, meetings, strict=True)
            ],
        )

    async def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`worker.method(*args)` on every rank with the same arguments."""
        return await self.calls.gather(
            _words(method), [actor.call.remote(method, *args, **kwargs) for actor in self.actors]
        )

    async def each(self, method: str, args_of_rank: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """`worker.method(*args_of_rank[rank])` on every rank."""
        pairs = zip(self.actors, args_of_rank, strict=True)
        return await self.calls.gather(
            _words(method), [actor.call.remote(method, *args, **kwargs) for actor, args in pairs]
        )

    async def each_kept(self, method: str, args_of_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `each`, but the results stay where they are: references to them, one per rank."""
        pairs = zip(self.actors, args_of_rank, strict=True)
        refs = [actor.call_and_keep.options(num_returns=2).remote(method, *args) for actor, args in pairs]
        await self.calls.gather(_words(method), [done for done, _ in refs])
        return [kept for _, kept in refs]

    async def one(self, rank: int, method: str, *args: Any) -> Any:
        """A method of the actor itself, on one rank."""
        return (await self.calls.gather(_words(method), [getattr(self.actors[rank], method).remote(*args)], [rank]))[0]

    async def shutdown(self) -> None:
        """Kill the actors, which first close what they have open if they still answer."""
        calls = [asyncio.wrap_future(actor.close.remote().future()) for actor in self.actors]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_S)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
