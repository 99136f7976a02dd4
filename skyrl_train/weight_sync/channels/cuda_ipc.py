"""Channel between two processes that share a GPU: the receiver maps the sender's buffers (CUDA IPC).

Each receiver has its own sender, the trainer rank on the same GPU, because a process sees only its own GPU. The buffers
live for one update: between updates the memory is used by training or by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from skyrl_train.device.memory import memory_to_share
from skyrl_train.weight_sync.channels.channel import ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.channels.signals import SLOTS, LocalReceiveChannel, LocalSendChannel
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.transport import Sender


def gpu_id() -> str:
    """Id of the current GPU, equal in every process that uses it."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class CudaIpcSendChannel(LocalSendChannel):
    max_bucket_bytes = 256 << 20

    def __init__(self, timeout_s: float) -> None:
        super().__init__(1, timeout_s)
        self._slots: list[Tensor | None] = [None] * SLOTS
        self._told: list[Tensor | None] = [None] * SLOTS
        """Buffers of which the receiver has the handle."""

    @property
    def init_info(self) -> ControlMessage:
        return {"transport": "cuda_ipc", "addresses": {gpu_id(): self.address}}

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        slot = self.next_slot(check)
        buffer = self._slots[slot]
        if buffer is None or len(buffer) < num_bytes:
            self._slots[slot] = None
            with memory_to_share():
                buffer = self._slots[slot] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        return buffer

    def publish(self, num_bytes: int) -> None:
        slot = self.slot
        buffer = self._slots[slot]
        assert buffer is not None
        handle = None
        if self._told[slot] is not buffer:
            _, handle = reduce_tensor(buffer)
            self._told[slot] = buffer
        torch.cuda.current_stream().synchronize()
        self.notify(self.bucket, handle)

    def drain(self, check: Check) -> None:
        super().drain(check)
        self._free()

    def _free(self) -> None:
        self._slots, self._told = [None] * SLOTS, [None] * SLOTS
        torch.cuda.ipc_collect()

    def abort(self) -> None:
        super().abort()
        self._free()

    def close(self) -> None:
        super().close()
        self._free()


class CudaIpcReceiveChannel(LocalReceiveChannel):
    def __init__(self, init_info: ControlMessage, timeout_s: float) -> None:
        """Args: init_info: with the `addresses` of all senders by GPU id."""
        address = init_info["addresses"].get(gpu_id())
        if address is None:
            raise WeightSyncError(
                "no policy rank runs on this engine's GPU, but CUDA IPC needs trainer.placement.colocate_all=true. "
                "Otherwise set generator.weight_sync_backend=broadcast"
            )
        super().__init__(address, timeout_s)
        self._slots: list[Tensor | None] = [None] * SLOTS

    def begin(self, sizes: Sequence[int]) -> None:
        self._free()
        super().begin(sizes)

    def next(self) -> Tensor:
        handle, _ = self.wait_ready()
        slot = self.slot
        if handle is not None:
            self._slots[slot] = None
            # The seventh item is the GPU's number in the sender's process.
            arguments = (*handle[:6], torch.cuda.current_device(), *handle[7:])
            self._slots[slot] = rebuild_cuda_tensor(*arguments)
        buffer = self._slots[slot]
        assert buffer is not None
        return buffer[: self.num_bytes]

    def release(self) -> None:
        torch.cuda.current_stream().synchronize()
        if self.is_last:
            self._free()  # before the sender is notified and frees the memory
        super().release()

    def _free(self) -> None:
        self._slots = [None] * SLOTS

    def close(self) -> None:
        self._free()  # as in `release`
        super().close()


def send(end: SendingEnd) -> Sender:
    return Sender(CudaIpcSendChannel(end.timeout_s), end.bucket_bytes, end.post)


def receive(end: ReceivingEnd) -> CudaIpcReceiveChannel:
    return CudaIpcReceiveChannel(end.info, end.timeout_s)
