"""Sends weights to servers of stock vLLM, through its own weight transfer backend `nccl`.

One sender is rank 0 of an NCCL group, the workers of all servers are the others. What travels is the servers' format:
tensors end to end without gaps (`packed`), a chunk being closed by the tensor with which it exceeds the agreed size.
vLLM views the bytes as they lie, so a tensor must start at a multiple of its element size; where it would not (float32
after an odd number of bfloat16), the update goes on in another call, which begins a chunk.

There are no digests: nothing on the other side could compare them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from skyrl_train.ranks import free_port
from skyrl_train.weight_sync.bucket import NamedTensors, TensorSpec, take
from skyrl_train.weight_sync.channels.broadcast_group import POLL_S
from skyrl_train.weight_sync.channels.channel import SendingEnd
from skyrl_train.weight_sync.channels.flight import Flight, Land
from skyrl_train.weight_sync.channels.meeting import wait_until
from skyrl_train.weight_sync.channels.table import STOCK
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.send_report import SendClock, SendReport

Chunk = tuple[TensorSpec, ...]


class Group(Protocol):
    """The NCCL group, seen from rank 0."""

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Start to send; the returned call says whether the buffer has been sent."""

    def close(self) -> None:
        """Returns soon, also while a broadcast waits for a peer."""


class NcclGroup:
    """vLLM's communicator, which is what its workers join."""

    def __init__(self, host: str, port: int, world_size: int, device: torch.device) -> None:
        """Blocks until all workers have joined; opens `port`."""
        # Only here: a run without stock servers needs no vLLM in its trainer's processes.
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        torch.cuda.set_device(device)
        index = torch.cuda.current_device()
        self._communicator = stateless_init_process_group(host, port, 0, world_size, index)
        if self._communicator.disabled:
            raise WeightSyncError("vLLM finds no NCCL library in the trainer's process: install the CUDA build of vLLM")
        self._stream = torch.cuda.Stream(index)

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        self._communicator.broadcast(buffer, src=0, stream=self._stream)
        return self._stream.record_event().query

    def close(self) -> None:
        self._communicator.destroy()


class StockNcclSender:
    """Rank 0. After a failed `send` neither the group nor a server that was receiving is of any use."""

    def __init__(self, end: SendingEnd, open_group: Callable[[str, int, int, torch.device], Group] = NcclGroup) -> None:
        self._end, self._open_group = end, open_group
        self._port, self._world_size = free_port(), 1 + end.num_receivers
        self._group: Group | None = None

    @property
    def init_info(self) -> ControlMessage:
        """For every server, with a `rank_offset` added: 1 plus the workers of the servers before it."""
        return {
            "transport": STOCK,
            "master_address": self._end.host,
            "master_port": self._port,
            "world_size": self._world_size,
            "bucket_bytes": self._end.bucket_bytes,
        }

    def connect(self, check: Check = lambda: None) -> None:
        """Blocks until all workers have joined, so they must be told `init_info` without waiting for them first.

        Args: check: unused; vLLM, which lets them meet, does not look after anybody meanwhile.
        """
        self._group = self._open_group(self._end.host, self._port, self._world_size, self._end.device)

    def send(self, specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> SendReport:
        """Returns when every server has loaded every tensor. The report has no digests.

        Args: as `Sender.send`.
        Raises: WeightSyncError if the tensors are not those, or a broadcast does not end; whatever a server raised.
        """
        group, self._group = self._group, None
        if group is None:
            raise WeightSyncError("the NCCL group is not connected, or broke in the last update: start the run anew")
        clock = SendClock()
        tensors = clock.source(named_tensors)
        flight = Flight(self._end.device)
        try:
            for update in cut_updates(specs, self._end.bucket_bytes):
                pending = self._end.post(_message(update))
                for chunk in update:
                    size = sum(spec.num_bytes for spec in chunk)
                    buffer = clock.wait(partial(flight.buffer, size, pending.check))
                    fill(chunk, tensors, buffer)
                    flight.send(size, lambda sent: self._land(group.broadcast(sent)))
                    clock.num_bytes += size
                clock.wait(partial(flight.drain, pending.check))
                clock.wait(pending.wait)
            left_over = next(tensors, None)
            if left_over is not None:
                raise WeightSyncError(f"the trainer exports {left_over[0]}, which it did not announce")
            self._group = group
        finally:
            if self._group is None:
                group.close()
        seconds = time.perf_counter() - clock.started
        return SendReport(
            num_bytes=clock.num_bytes,
            num_buckets=flight.num_sent,
            seconds=seconds,
            plan_s=0.0,
            convert_s=clock.convert_s,
            pack_s=seconds - clock.convert_s - clock.wait_s,
            digest_s=0.0,
            wait_s=clock.wait_s,
            digests={},
        )

    def _land(self, is_sent: Callable[[], bool]) -> Land:
        """NCCL only enqueues, and a peer that failed never comes: so look at both."""
        timeout_s = self._end.timeout_s
        late = f"a broadcast to the vLLM servers did not end within {timeout_s:g} s"
        return lambda check: wait_until(is_sent, POLL_S, timeout_s, late, check)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def send(end: SendingEnd) -> StockNcclSender:
    return StockNcclSender(end)


def cut_updates(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[Chunk]]:
    """Calls of update_weights, each with its chunks, in the order of the specs.

    vLLM's rule: a chunk ends with the tensor that takes it above `bucket_bytes`, or with the call.
    """
    updates: list[list[Chunk]] = []
    chunks: list[Chunk] = []
    waiting: list[TensorSpec] = []
    used = 0

    def close_chunk() -> None:
        nonlocal used
        if waiting:
            chunks.append(tuple(waiting))
            waiting.clear()
            used = 0

    for spec in specs:
        if used % spec.dtype.itemsize:
            close_chunk()
            updates.append(list(chunks))
            chunks.clear()
        waiting.append(spec)
        used += spec.num_bytes
        if used > bucket_bytes:
            close_chunk()
    close_chunk()
    return [*updates, chunks] if chunks else updates


def fill(chunk: Chunk, tensors: Iterator[tuple[str, Tensor]], buffer: Tensor) -> None:
    """Copy the chunk's tensors end to end into a buffer of just their size; each before the next is asked for.

    Raises: WeightSyncError if a tensor is not what was announced.
    """
    start = 0
    for spec in chunk:
        room = buffer[start : start + spec.num_bytes]
        room.view(spec.dtype).view(spec.shape).copy_(take(spec, tensors))
        start += spec.num_bytes


def _message(update: Sequence[Chunk]) -> ControlMessage:
    specs = [spec.to_message() for chunk in update for spec in chunk]
    return {
        "names": [name for name, _, _ in specs],
        "dtype_names": [dtype for _, dtype, _ in specs],
        "shapes": [shape for _, _, shape in specs],
    }
