"""CUDA IPC without a GPU: memory of the host stands in for the device's, its number for CUDA's handle."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.weight_sync.channels import cuda_ipc
from skyrl_train.weight_sync.channels.cuda_ipc import CudaIpcReceiveChannel, CudaIpcSendChannel
from skyrl_train.weight_sync.channels.signals import LocalReceiveChannel, LocalSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.sending import InThread, ReceivingEnd, specs_of

TIMEOUT_S = 5.0
SENDERS_GPU, RECEIVERS_GPU = 3, 0
"""The number that the one GPU has in each process."""


class Device:
    """A GPU of host memory. It notes in order what each end, a thread, did to it and told the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: dict[str, list[str]] = defaultdict(list)
        self._buffers: list[torch.Tensor | None] = []
        self._mapped: list[weakref.ref[torch.Tensor]] = []
        stream = SimpleNamespace(synchronize=lambda: self.note("synchronize"))
        cuda = SimpleNamespace(
            current_device=lambda: SENDERS_GPU if self._side() == "sender" else RECEIVERS_GPU,
            get_device_properties=lambda number: SimpleNamespace(uuid="GPU-1"),
            current_stream=lambda: stream,
            ipc_collect=lambda: self.note("collect"),
        )
        patch.setattr(cuda_ipc, "torch", SimpleNamespace(cuda=cuda, empty=self._new, uint8=torch.uint8))
        patch.setattr(cuda_ipc, "memory_to_share", lambda: contextlib.nullcontext(self.note("memory to share")))
        patch.setattr(cuda_ipc, "reduce_tensor", self._reduce)
        patch.setattr(cuda_ipc, "rebuild_cuda_tensor", self._rebuild)
        self._watch(
            patch,
            LocalSendChannel,
            "notify",
            lambda n, content=None, **_: f"notify {n}{' with handle' * bool(content)}",
        )
        self._watch(patch, LocalSendChannel, "wait_taken", lambda count, check: f"wait for {count}")
        self._watch(patch, LocalReceiveChannel, "taken", lambda bucket: f"taken {bucket}, {self._num_mapped} mapped")

    def _watch(self, patch: pytest.MonkeyPatch, of: type, method: str, words: Callable[..., str]) -> None:
        real = getattr(of, method)

        def watched(it: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(words(*args, **kwargs))
            return real(it, *args, **kwargs)

        patch.setattr(of, method, watched)

    def note(self, what: str) -> None:
        self.done[self._side()].append(what)

    @staticmethod
    def _side() -> str:
        return "sender" if threading.current_thread() is threading.main_thread() else "receiver"

    @property
    def _num_mapped(self) -> int:
        return sum(one() is not None for one in self._mapped)

    def _new(self, num_bytes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert (dtype, device) == (torch.uint8, "cuda")
        self.note(f"new {num_bytes}")
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def _reduce(self, buffer: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        self._buffers.append(buffer)
        return None, (None,) * 6 + (SENDERS_GPU, len(self._buffers) - 1)

    def _rebuild(self, *handle: Any) -> torch.Tensor:
        *_, gpu, number = handle
        assert gpu == RECEIVERS_GPU, "the GPU has another number in the sender's process"
        buffer = self._buffers[number]
        assert buffer is not None
        mapped = buffer.view_as(buffer)  # a tensor of its own over the same bytes
        self._mapped.append(weakref.ref(mapped))
        self.note(f"map {number}")
        return mapped


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def connected(load: Any) -> tuple[Sender, ReceivingEnd]:
    end = ReceivingEnd(load)
    sender = Sender(CudaIpcSendChannel(TIMEOUT_S), 1024, end.post)
    joined = InThread(sender.connect)
    end.receiver = Receiver(CudaIpcReceiveChannel(sender.init_info, TIMEOUT_S))
    joined.wait()
    return sender, end


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Buckets of 1024, 1024, 2048 and 1024 bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"t{n}", torch.randn(size, generator=generator)) for n, size in enumerate((256, 256, 512, 256))]


def test_each_update_maps_every_buffer_once_and_frees_it_before_the_sender_learns_of_the_end(device: Device):
    loaded: dict[str, torch.Tensor] = {}
    sender, end = connected(lambda pairs: loaded.update({name: tensor.clone() for name, tensor in pairs}))
    for update in range(2):
        device.done.clear()
        sent = weights(update)
        report = sender.send(specs_of(sent), sent)
        assert report.digests == end.digests and all(torch.equal(loaded[name], tensor) for name, tensor in sent)
        first = 3 * update
        assert device.done["sender"] == [
            *("wait for -1", "memory to share", "new 1024", "synchronize", "notify 0 with handle"),
            *("wait for 0", "memory to share", "new 1024", "synchronize", "notify 1 with handle"),
            *("wait for 1", "memory to share", "new 2048", "synchronize", "notify 2 with handle"),
            *("wait for 2", "synchronize", "notify 3"),
            *("wait for 4", "collect"),
        ]
        assert device.done["receiver"] == [
            *(f"map {first}", "synchronize", "taken 0, 1 mapped"),
            *(f"map {first + 1}", "synchronize", "taken 1, 2 mapped"),
            *(f"map {first + 2}", "synchronize", "taken 2, 2 mapped"),
            *("synchronize", "taken 3, 0 mapped"),
        ]
    sender.close()


def test_a_sender_that_fails_gives_its_memory_back_and_ends_the_receiver(device: Device):
    def source() -> Any:
        yield "t0", torch.zeros(256)
        raise RuntimeError("conversion failed")

    sender, end = connected(lambda pairs: None)
    with pytest.raises(RuntimeError, match="conversion failed"):
        sender.send(specs_of(weights(0)), source())
    assert device.done["sender"][-2:] == ["notify -1", "collect"]
    assert end.received is not None
    with pytest.raises(WeightSyncError, match="gave up"):
        end.received.wait()
    sender.close()


def test_an_engine_beside_no_rank_is_an_error_that_says_what_to_do(device: Device):
    with pytest.raises(WeightSyncError, match="weight_sync_backend=broadcast"):
        CudaIpcReceiveChannel({"addresses": {"GPU-2": "/tmp/skyrl_sync_nobody/socket"}}, TIMEOUT_S)
