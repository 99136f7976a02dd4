"""Actors that act as one: every call goes to all ranks, and the failure of one rank is the failure of the call."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import ray

from skyrl_train.cluster.calls import Calls
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import host, log_to, talk_through_node_address
from skyrl_train.inference.stock_nccl import StockNcclSender
from skyrl_train.ranks import Rendezvous, free_port
from skyrl_train.weight_sync.transport import ControlMessage, Sender, SendReport


class RankActor:
    """One process of a group; holds a plain worker object and makes the calls that need Ray for it."""

    def __init__(self, name: str, log_path: str) -> None:
        log_to(log_path)
        talk_through_node_address()
        import torch

        torch.set_num_threads(1)
        self._name = name
        self._sender: Sender | StockNcclSender | None = None
        self._worker: Any = None

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
        self, engines: Sequence[Any], backend: str, bucket_bytes: int, num_workers: int, timeout_s: float
    ) -> ControlMessage:
        """Make this rank a sender of weights and return what the engines must be told."""
        from skyrl_train.device import device
        from skyrl_train.weight_sync.channels import send_channel

        if self._sender is not None:
            self._sender.close()

        def post(message: ControlMessage) -> PostedCalls:
            calls = [engine.update_weights.remote(message | {"sender": self._name}) for engine in engines]
            return PostedCalls(calls, timeout_s)

        if backend == "vllm_nccl":
            self._sender = StockNcclSender(bucket_bytes, post, num_workers, device(), timeout_s, host())
        else:
            channel = send_channel(backend, num_workers, device(), timeout_s, host())
            self._sender = Sender(channel, bucket_bytes, post)
        return self._sender.init_info | {"sender": self._name, "timeout_s": timeout_s}

    def connect_sender(self) -> None:
        """Wait until every receiver has joined."""
        assert self._sender is not None
        self._sender.connect()

    def send_weights(self, dtype_name: str, *, all_stages: bool) -> SendReport | None:
        """Export this stage's weights; every rank of the stage takes part, its owner sends and reports.

        Args: all_stages: one rank sends the weights of all stages, and all ranks take part.
        """
        import torch

        dtype = getattr(torch, dtype_name)
        if all_stages:
            specs, tensors = self._worker.export_to_first_stage(dtype)
        else:
            specs, tensors = self._worker.export_specs(dtype), self._worker.export(dtype)
        if self._sender is not None:
            return self._sender.send(specs, tensors)
        for _ in tensors:
            pass
        return None


class PostedCalls:
    """Calls to several actors that run, as a sender of weights waits for them."""

    def __init__(self, calls: list[Any], timeout_s: float) -> None:
        self._calls, self._timeout_s = calls, timeout_s

    def check(self) -> None:
        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        ray.get(done)

    def wait(self) -> None:
        ray.get(self._calls, timeout=self._timeout_s)


def _words(method: str) -> str:
    """For messages: "failed to keep old logprobs"."""
    return method.replace("_", " ") if "_" in method or method == "update" else f"compute {method}"


class WorkerGroup:
    """The ranks of the policy or of the reference."""

    def __init__(self, name: str, slots: Sequence[Slot], log_folder: str, timeout_s: float) -> None:
        """Asks Ray to start the actors and returns at once."""
        names = tuple(f"{name}-{rank}" for rank in range(len(slots)))
        self.calls = Calls(names, timeout_s, log_folder)
        actor = ray.remote(RankActor)
        self.actors = [
            actor.options(  # type: ignore[attr-defined]
                num_cpus=slot.num_cpus, num_gpus=slot.num_gpus, scheduling_strategy=slot.strategy
            ).remote(rank_name, f"{log_folder}/{rank_name}.log")
            for slot, rank_name in zip(slots, names, strict=True)
        ]

    @property
    def size(self) -> int:
        return len(self.actors)

    async def build(self, entry_point: str, kwargs: dict[str, Any]) -> list[Any]:
        """Make `module:Class` on every rank; returns each rank's place in the layout."""
        address, port = await self.one(0, "find_meeting_place")
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

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
