"""The process of one rank: it holds a plain worker, and sends that worker's weights to the engines."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.process import host, log_to, talk_through_node_address, use_devices
from skyrl_train.device import memory_in_use
from skyrl_train.engines.remote.stock_nccl import StockNcclSender
from skyrl_train.imports import quick_imports
from skyrl_train.ranks import Rendezvous, free_port
from skyrl_train.stores import LOOPBACK
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.errors import WeightSyncError
from skyrl_train.weight_sync.send_report import SendReport
from skyrl_train.weight_sync.transport import Sender

Reach = Literal["own_stage", "first_stage", "every_stage"]
"""Where the tensors of a pipeline stage are sent from: its own owner, the first stage's, or every rank."""


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
        with quick_imports(without=("wandb",)):  # Megatron would; no rank logs to it
            worker = getattr(importlib.import_module(module), name)
        self._worker = worker(rendezvous, **kwargs)
        return self._worker.ranks

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._worker, method)(*args, **kwargs)

    def call_and_keep(self, method: str, *args: Any) -> tuple[None, Any]:
        """As `call`; the driver waits for the first result and hands on a reference to the second."""
        return None, self.call(method, *args)

    def open_sender(
        self,
        engines: Mapping[str, Any],
        backend: str,
        bucket_bytes: int,
        num_workers: int,
        timeout_s: float,
        name: str,
        nodes: Collection[str] | None = None,
    ) -> ControlMessage:
        """Make this rank a sender of weights and return what the engines (name -> actor) must be told.

        Args: engines: to whom this rank posts its messages; num_workers: of all engines; name: of the sender;
            nodes: of the engines, None where they may be anywhere.
        """
        from skyrl_train.device import device
        from skyrl_train.weight_sync.channels.table import send_channel

        if self._sender is not None:
            self._sender.close()

        def post(message: ControlMessage) -> PostedCalls:
            message = message | {"sender": name}
            calls = {engine_name: engine.update_weights.remote(message) for engine_name, engine in engines.items()}
            return PostedCalls("take in the weights", calls, timeout_s)

        is_alone = nodes is not None and set(nodes) <= {ray.get_runtime_context().get_node_id()}
        address = LOOPBACK if is_alone else host()
        if backend == "vllm_nccl":
            self._sender = StockNcclSender(bucket_bytes, post, num_workers, device(), timeout_s, address)
        else:
            channel = send_channel(backend, num_workers, device(), timeout_s, address)
            self._sender = Sender(channel, bucket_bytes, post)
        return self._sender.init_info | {"sender": name, "timeout_s": timeout_s}

    def close(self) -> None:
        """Before the end of the process: leave nothing behind that outlives it."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def connect_sender(self, joining: Mapping[str, Any]) -> None:
        """Wait until every receiver has joined.

        Args: joining: name of each engine -> the call in which it joins; when one fails the others are let go.
        Raises: WeightSyncError.
        """
        assert self._sender is not None
        self._sender.connect(PostedCalls("join the weight sync", joining).check)

    def close_sender(self) -> None:
        """Let the receivers of a sync that broke off go; `open_sender` opens another."""
        if self._sender is not None:
            self._sender.close()

    def send_weights(self, dtype_name: str, reach: Reach) -> SendReport | None:
        """Export this stage's weights; every rank of the stage takes part, its owner sends and reports.

        The export runs to its end also where sending fails: the other ranks of the stage wait for this one in it.
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

    def __init__(self, what: str, calls: Mapping[str, Any], timeout_s: float = 0.0) -> None:
        """Args: what they are to do; calls: name of the engine -> reference to its result; timeout_s of `wait`."""
        self._what, self._timeout_s = what, timeout_s
        self._names = {call: name for name, call in calls.items()}

    def check(self) -> None:
        self._raise_errors(0.0)

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while late := self._raise_errors(min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{', '.join(late)} did not {self._what} within {self._timeout_s:g} s")

    def _raise_errors(self, timeout_s: float) -> list[str]:
        """Returns: the engines that are still at work after that time."""
        done, running = ray.wait(list(self._names), num_returns=len(self._names), timeout=timeout_s)
        for call in done:
            try:
                ray.get(call)
            except RayActorError as error:
                raise WeightSyncError(f"{self._names[call]} died when asked to {self._what}") from error
            except RayTaskError as error:
                raise WeightSyncError(
                    f"{self._names[call]} could not {self._what}: {type(error.cause).__name__}: {error.cause}"
                ) from error
        return [self._names[call] for call in running]
