"""What is sent to stock vLLM servers, taken apart by vLLM's own receiving code; only NCCL itself is missing here."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.engines.remote.stock_nccl import StockNcclSender, split_updates
from skyrl_train.weight_sync.bucket import TensorSpec
from skyrl_train.weight_sync.channels.channel import SendingEnd
from skyrl_train.weight_sync.control import ControlMessage, PeerLostError, WeightSyncError
from tests.support.sending import InThread, specs_of

BUCKET = 4096
Named = list[tuple[str, Tensor]]


class Wire:
    """Both ends of a group whose broadcasts pass through a queue; a buffer is sent when it has been taken."""

    def __init__(self) -> None:
        self._buffers: queue.Queue[tuple[Tensor, list[bool]]] = queue.Queue()
        self.is_closed = False

    def __call__(self, host: str, port: int, world_size: int, device: torch.device) -> Wire:
        return self

    def broadcast(self, buffer: Tensor, src: int | None = None) -> Callable[[], bool]:
        if src is None:
            taken: list[bool] = []
            self._buffers.put((buffer, taken))
            return lambda: bool(taken)
        sent, taken = self._buffers.get(timeout=20)
        buffer.copy_(sent)  # raises where the ends disagree about the size
        taken.append(True)
        return lambda: True

    def close(self) -> None:
        self.is_closed = True


class VllmWorker:
    """Receives with the code of the installed vLLM."""

    def __init__(self, wire: Wire, fails: str = "") -> None:
        self._wire, self._fails = wire, fails
        self.loaded: Named = []
        self.messages: list[ControlMessage] = []

    def post(self, message: ControlMessage) -> InThread:
        self.messages.append(message)
        return InThread(lambda: self._receive(message))

    def _receive(self, message: ControlMessage) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        if self._fails:
            raise RuntimeError(self._fails)
        columns = zip(message["names"], message["dtype_names"], message["shapes"], strict=True)
        packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in columns),
            group=self._wire,
            src=0,
            post_unpack_func=lambda named: self.loaded.extend((name, tensor.clone()) for name, tensor in named),
            buffer_size_bytes=BUCKET,
            num_buffers=2,
            device="cpu",
        )


class Stream:
    def synchronize(self) -> None:
        """There is no device to wait for."""


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: tuple(Stream() for _ in range(count)))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)


def sender_to(worker: VllmWorker, wire: Wire, timeout_s: float = 20.0) -> StockNcclSender:
    end = SendingEnd(worker.post, BUCKET, 1, torch.device("cpu"), timeout_s, "127.0.0.1")
    sender = StockNcclSender(end, open_group=wire)
    sender.connect()
    return sender


def tensors_of(*shapes: tuple[torch.dtype, tuple[int, ...]]) -> Named:
    torch.manual_seed(1)
    return [(f"tensor.{n}", torch.randn(shape).to(dtype)) for n, (dtype, shape) in enumerate(shapes)]


def overwritten(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Copies that are overwritten as soon as no more tensors are asked for."""
    copies = [(name, tensor.clone()) for name, tensor in named]
    yield from copies
    for _, tensor in copies:
        tensor.zero_()


pytestmark = pytest.mark.slow
HALF, FULL = torch.bfloat16, torch.float32
MODELS = {
    "one tensor": [(FULL, (3, 5))],
    "several chunks": [(HALF, (20, 30))] * 17,
    "just full, then more": [(FULL, (1024,)), (FULL, (1,)), (FULL, (7,))],
    "larger than a chunk": [(HALF, (4, 4)), (FULL, (50, 50)), (HALF, (64,))],
    "float32 after an odd number of bfloat16": [(HALF, (9,)), (FULL, (4,)), (HALF, (3,)), (HALF, (2,)), (FULL, (2, 2))],
    "a scalar and an empty one": [(FULL, ()), (FULL, (0, 4)), (HALF, (2,))],
}


@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_vllm_takes_apart_what_is_sent(shapes: Any):
    wire, named = Wire(), tensors_of(*shapes)
    worker = VllmWorker(wire)
    sender = sender_to(worker, wire)
    for _ in range(2):
        worker.loaded.clear()
        report = sender.send(specs_of(named), overwritten(named))
        assert [name for name, _ in worker.loaded] == [name for name, _ in named]
        for (_, sent), (_, loaded) in zip(named, worker.loaded, strict=True):
            assert loaded.dtype == sent.dtype and torch.equal(loaded, sent)
        assert report.num_bytes == sum(tensor.nbytes for _, tensor in named) and report.digests == {}
    assert not wire.is_closed


def test_a_call_ends_before_a_tensor_that_would_not_be_aligned():
    shapes = [(HALF, (3,)), (FULL, (2,)), (FULL, (2,)), (HALF, (1,)), (FULL, (1,))]
    updates = split_updates(specs_of(tensors_of(*shapes)), BUCKET)
    assert [[[spec.name[-1] for spec in chunk] for chunk in update] for update in updates] == [
        [["0"]],
        [["1", "2", "3"]],
        [["4"]],
    ]


def test_a_usual_model_is_one_call():
    specs = [TensorSpec(f"layers.{n}.mlp.up_proj.weight", HALF, (64, 32)) for n in range(50)]
    (update,) = split_updates(specs, BUCKET)
    assert len(update) == 25, "of 4096 bytes each, a chunk is full with the tensor that exceeds it"


def test_what_a_server_raised_ends_the_send_and_the_group():
    wire = Wire()
    worker = VllmWorker(wire, fails="no such parameter")
    sender = sender_to(worker, wire)
    named = tensors_of((FULL, (4096,)), (FULL, (4096,)), (FULL, (4096,)))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no such parameter"):
        sender.send(specs_of(named), named)
    assert time.monotonic() - started < 15 and wire.is_closed
    with pytest.raises(WeightSyncError, match="failed in the last update"):
        sender.send(specs_of(named), named)


def test_a_server_that_does_not_take_part_is_given_up_at_the_deadline():
    class Silent(VllmWorker):
        def _receive(self, message: ControlMessage) -> None:
            time.sleep(2)

    wire = Wire()
    sender = sender_to(Silent(wire), wire, timeout_s=0.5)
    named = tensors_of((FULL, (8,)))
    with pytest.raises(PeerLostError, match=r"did not finish within 0\.5 s"):
        sender.send(specs_of(named), named)
    assert wire.is_closed


@pytest.mark.parametrize(("change", "expected"), [("fewer", "nothing more"), ("more", "not in its specs")])
def test_other_tensors_than_announced_end_the_send(change: str, expected: str):
    wire, named = Wire(), tensors_of((FULL, (8,)), (FULL, (8,)))
    sender = sender_to(VllmWorker(wire), wire)
    announced, sent = (named, named[:1]) if change == "fewer" else (named[:1], named)
    with pytest.raises(WeightSyncError, match=expected):
        sender.send(specs_of(announced), sent)
    assert wire.is_closed
