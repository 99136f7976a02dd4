"""Sends weights to servers of stock vLLM, through vLLM's weight transfer backend `nccl`.

The sender is rank 0 of an NCCL group, the workers of all servers are the other ranks. Tensors are sent end to end
without gaps (`packed`); a chunk ends with the tensor that takes it above the agreed size. vLLM views the bytes in
place, so a tensor must start at a multiple of its element size; if it would not (float32 after an odd number of
bfloat16), the rest is sent in another call, which begins a new chunk. There are no digests: the server could not
compare them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_train.ranks import free_port
from skyrl_train.weight_sync.bucket import NamedTensors, TensorSpec, finish, next_tensors
from skyrl_train.weight_sync.channels.broadcast import Flight
from skyrl_train.weight_sync.channels.broadcast_group import POLL_S, Land, wait_until
from skyrl_train.weight_sync.channels.channel import SendingEnd
from skyrl_train.weight_sync.channels.table import STOCK
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.send_report import SendClock, SendReport

Chunk = tuple[TensorSpec, ...]


class NcclGroup:
    """vLLM's communicator, seen from rank 0."""

    def __init__(self, host: str, port: int, world_size: int, device: torch.device) -> None:
        """Blocks until all workers have joined; opens `port`."""
        # Imported here, because runs without stock servers need no vLLM in trainer processes.
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        torch.cuda.set_device(device)
        index = torch.cuda.current_device()
        self._communicator = stateless_init_process_group(host, port, 0, world_size, index)
        if self._communicator.disabled:
            raise WeightSyncError("vLLM finds no NCCL library in the trainer's process. Install the CUDA build of vLLM")
        self._stream = torch.cuda.Stream(index)

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Start sending; the returned function says whether the buffer was sent."""
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        self._communicator.broadcast(buffer, src=0, stream=self._stream)
        return self._stream.record_event().query

    def close(self) -> None:
        """Returns soon, even if a broadcast waits for a peer."""
        self._communicator.destroy()


class StockNcclSender:
    """Rank 0. After a failed `send`, neither the group nor a server that was receiving can be used."""

    def __init__(self, end: SendingEnd, open_group: Callable[..., Any] = NcclGroup) -> None:
        self._end, self._open_group = end, open_group
        self._port, self._world_size = free_port(), 1 + end.num_receivers
        self._group: NcclGroup | None = None

    @property
    def init_info(self) -> ControlMessage:
        """Each server gets it with a `rank_offset`: 1 plus the workers of the servers before it."""
        return {
            "transport": STOCK,
            "master_address": self._end.host,
            "master_port": self._port,
            "world_size": self._world_size,
            "bucket_bytes": self._end.bucket_bytes,
        }

    def connect(self, check: Check = lambda: None) -> None:
        """Block until all workers have joined; they must have received `init_info` and be joining already.
        Args: check: unused, because vLLM's rendezvous has no hook for it.
        """
        self._group = self._open_group(self._end.host, self._port, self._world_size, self._end.device)

    def send(self, specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> SendReport:
        """Returns when every server has loaded every tensor. The report has no digests.
        Raises: WeightSyncError if the tensors differ from the specs, or a broadcast times out; a server's own error.
        """
        group, self._group = self._group, None
        if group is None:
            raise WeightSyncError("the NCCL group is not connected, or failed in the last update. Restart the run")
        clock = SendClock()
        tensors = iter(named_tensors)
        flight = Flight(self._end.device)
        try:
            for update in split_updates(specs, self._end.bucket_bytes):
                pending = self._end.post(_message(update))
                for chunk in update:
                    with clock.timed("convert_s"):
                        taken = next_tensors(chunk, tensors)
                    size = sum(spec.num_bytes for spec in chunk)
                    with clock.timed("wait_s"):
                        buffer = flight.buffer(size, pending.check)
                    fill(chunk, taken, buffer)
                    del taken
                    flight.send(lambda sent: self._land(group.broadcast(sent)))
                    clock.count(chunk)
                with clock.timed("wait_s"):
                    flight.drain(pending.check)
                    pending.wait()
            with clock.timed("convert_s"):
                finish(tensors)
            self._group = group
        finally:
            if self._group is None:
                group.close()
        return clock.report()

    def _land(self, is_sent: Callable[[], bool]) -> Land:
        """NCCL only enqueues, and a failed peer never joins: so poll both."""
        timeout_s = self._end.timeout_s
        late = f"a broadcast to the vLLM servers did not finish within {timeout_s:g} s"
        return lambda check: wait_until(is_sent, POLL_S, timeout_s, late, check)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def split_updates(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[Chunk]]:
    """Chunks of each call of update_weights, in the order of the specs."""
    updates: list[list[list[TensorSpec]]] = [[[]]]
    used = 0
    for spec in specs:
        if used % spec.dtype.itemsize:  # another call, whose first chunk begins at a multiple
            updates.append([[]])
            used = 0
        updates[-1][-1].append(spec)
        used += spec.num_bytes
        if used > bucket_bytes:
            updates[-1].append([])
            used = 0
    return [chunks for update in updates if (chunks := [tuple(chunk) for chunk in update if chunk])]


def fill(chunk: Chunk, tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy the chunk's tensors end to end into a buffer of exactly their size."""
    ends = itertools.accumulate(spec.num_bytes for spec in chunk)
    targets = [
        buffer[end - spec.num_bytes : end].view(spec.dtype).view(spec.shape)
        for spec, end in zip(chunk, ends, strict=True)
    ]
    with torch.no_grad():
        torch._foreach_copy_(targets, list(tensors))


def _message(update: Sequence[Chunk]) -> ControlMessage:
    specs = [spec.to_message() for chunk in update for spec in chunk]
    return {
        "names": [name for name, _, _ in specs],
        "dtype_names": [dtype for _, dtype, _ in specs],
        "shapes": [shape for _, _, shape in specs],
    }
