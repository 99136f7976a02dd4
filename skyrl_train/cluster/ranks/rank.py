"""The process of one rank: it holds a plain worker, and sends that worker's weights to the engines.

Imports torch in functions: the driver starts the engines that share a rank's device once `find_place` has answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.cluster.process import host
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.device.memory import memory_in_use
from skyrl_train.imports import megatron_imports
from skyrl_train.ranks import LOOPBACK, Rendezvous
from skyrl_train.stores import listen
from skyrl_train.weight_sync.channels.table import open_sender, transport
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

if TYPE_CHECKING:
    from skyrl_train.weight_sync.bucket import TensorSpec
    from skyrl_train.weight_sync.channels.channel import WeightSender
    from skyrl_train.weight_sync.send_report import SendReport


class Rank:
    """Makes a plain worker in `build`, forwards calls to it, and sends its weights to the engines."""

    def __init__(self) -> None:
        self._senders: dict[str, WeightSender] = {}
        """By the purpose of the engines that they send to."""
        self._posting: set[str] = set()
        """Purposes of the senders that post the messages, for themselves and others that send the same."""
        self._worker: Any = None
        self._listening: socket.socket | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def find_place(self) -> tuple[str, int, str]:
        """`worker_group.Place`: node, process id, visible devices."""
        return ray.get_runtime_context().get_node_id(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def memory(self) -> dict[str, float]:
        return memory_in_use()

    def listen(self, on_one_node: bool) -> tuple[str, int]:
        """Hold the port at which rank 0 will serve the group's store. Args: on_one_node: whether all ranks are on this
        node. Returns: host and port.
        """
        address = LOOPBACK if on_one_node else host()
        self._listening = listen(address)
        return address, self._listening.getsockname()[1]

    def import_modules(self, names: Sequence[str]) -> None:
        """Import trainer.custom_modules. Raises: ValueError naming the module that cannot be imported."""
        import_modules(names)

    def build(self, entry_point: str, rendezvous: Rendezvous, kwargs: dict[str, Any]) -> Any:
        """Make the worker `module:Class`. Returns: its position in the layout."""
        import torch

        torch.set_num_threads(1)
        with megatron_imports():
            worker = resolve_name(entry_point)
        # If this fails, the others must not wait for a store that nobody serves.
        with self._listening or contextlib.nullcontext():
            self._worker = worker(replace(rendezvous, listening=self._listening), **kwargs)
        return self._worker.ranks

    def open_sender(
        self,
        purpose: str,
        engines: Mapping[str, Any],
        settings: GeneratorConfig,
        num_workers: int,
        name: str,
        nodes: Collection[str] | None = None,
    ) -> ControlMessage:
        """Make this rank a sender of weights. Returns: the message with which engines join it.

        Args: purpose: of the engines; engines: name -> actor that this rank posts its messages to; num_workers: of all
            engines; name: of the sender; nodes: of the engines, None for anywhere.
        """
        from skyrl_train.device import device
        from skyrl_train.weight_sync.channels.channel import SendingEnd

        self.close(purpose)
        (self._posting.add if engines else self._posting.discard)(purpose)
        timeout_s = settings.weight_sync_timeout_s

        def post(message: ControlMessage) -> PostedCalls:
            message = message | {"sender": name}
            calls = {to: engine.call.remote("update_weights", message) for to, engine in engines.items()}
            return PostedCalls("load the weights", calls, timeout_s)

        is_alone = nodes is not None and set(nodes) <= {ray.get_runtime_context().get_node_id()}
        end = SendingEnd(
            post=post,
            bucket_bytes=settings.weight_sync_bucket_mb << 20,
            num_receivers=num_workers,
            device=device(),
            timeout_s=timeout_s,
            host=LOOPBACK if is_alone else host(),
        )
        sender = self._senders[purpose] = open_sender(settings.weight_sync_backend, end)
        sent = {"transport": settings.weight_sync_backend, "sender": name, "weight_sync_timeout_s": timeout_s}
        specs = [spec.to_message() for spec in self._specs(settings)]
        return sent | {"specs": specs} | sender.init_info

    def connect_sender(self, purpose: str, joining: Mapping[str, Any]) -> None:
        """Wait until every receiver has joined.

        Args: joining: name of each engine -> its call that joins; when one fails, the others are released.
        Raises: WeightSyncError.
        """
        self._senders[purpose].connect(PostedCalls("join the weight sync", joining).check)

    def close(self, purpose: str | None = None) -> None:
        """Close a sender, or all, which releases its receivers and leaves nothing that outlives this process."""
        for each in [purpose] if purpose is not None else [*self._senders]:
            if (sender := self._senders.pop(each, None)) is not None:
                sender.close()

    def prepare_export(self, settings: GeneratorConfig) -> None:
        """Do what a process does once for all exports, before engines are paused. A collective over all ranks."""
        import torch

        self._worker.prepare_export(getattr(torch, settings.model_dtype))
        self._specs(settings)

    def _specs(self, settings: GeneratorConfig) -> Sequence[TensorSpec]:
        """Specs of what this rank sends in each sync. The first call is a collective if that is every stage."""
        import torch

        dtype = getattr(torch, settings.model_dtype)
        if transport(settings.weight_sync_backend).scope == "own_stage":
            return self._worker.export_specs(dtype)
        return self._worker.specs_of_every_stage(dtype)

    def send_weights(self, purpose: str, settings: GeneratorConfig) -> SendReport | None:
        """Export weights, in which every rank takes part. A sender sends them and returns its report, in short if
        another rank posts the messages and sends the same.

        The export runs to its end even if sending fails: the other ranks of the stage wait for this one in it.
        """
        import torch

        dtype = getattr(torch, settings.model_dtype)
        own = transport(settings.weight_sync_backend).scope == "own_stage"
        tensors = self._worker.export(dtype) if own else self._worker.export_to_every_stage(dtype)
        specs = self._specs(settings)
        try:
            if (sender := self._senders.get(purpose)) is None:
                return None
            report = sender.send(specs, tensors)
            return report if purpose in self._posting else report.short()
        finally:
            for _ in tensors:
                pass


class PostedCalls:
    """Running calls of several engines, for a sender of weights to wait for."""

    def __init__(self, what: str, calls: Mapping[str, Any], timeout_s: float = 0.0) -> None:
        """Args: what: the calls' task, for errors; calls: name of the engine -> reference; timeout_s: of `wait`."""
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
        """Returns: the engines whose calls still run after that time."""
        done, running = ray.wait(list(self._names), num_returns=len(self._names), timeout=timeout_s)
        for call in done:
            try:
                ray.get(call)
            except RayTaskError as error:
                raise WeightSyncError(
                    f"{self._names[call]} could not {self._what}: {type(error.cause).__name__}: {error.cause}"
                ) from error
            except RayError as error:  # its process has ended, or Ray killed it because the host's memory ran out
                raise WeightSyncError(f"{self._names[call]} died when asked to {self._what}") from error
        return [self._names[call] for call in running]
