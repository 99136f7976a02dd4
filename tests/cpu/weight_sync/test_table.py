"""A transport that is added with a file and one line of the table is checked, opened and carries weights."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.checks.engines import transport_problems
from skyrl_train.cluster.devices import sync_backend
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import load_config
from skyrl_train.weight_sync.channels import table
from skyrl_train.weight_sync.channels.channel import ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.channels.table import TRANSPORTS, Transport
from skyrl_train.weight_sync.control import Check
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.sending import ReceivingEnd as Loading
from tests.support.sending import specs_of

CPU = torch.device("cpu")
PIPES: dict[int, queue.Queue[Tensor]] = {}


class PipeSender:
    """Hands copies of the buckets to a receiver in the same process."""

    max_bucket_bytes = 4096

    def __init__(self) -> None:
        self.init_info = {"transport": "pipe", "pipe": id(self)}
        self._pipe: queue.Queue[Tensor] = PIPES.setdefault(id(self), queue.Queue())

    def connect(self, check: Check) -> None:
        """The receiver needs no answer."""

    def begin(self) -> None:
        """Buckets are made one by one."""

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer

    def publish(self, num_bytes: int) -> None:
        self._pipe.put(self._buffer[:num_bytes].clone())

    def drain(self, check: Check) -> None:
        """The receiver answers the call of the engine."""

    def abort(self) -> None:
        """Nobody waits here."""

    def close(self) -> None:
        PIPES.pop(id(self), None)


class PipeReceiver:
    def __init__(self, pipe: int, timeout_s: float) -> None:
        self._pipe, self._timeout_s = PIPES[pipe], timeout_s

    def begin(self, sizes: Sequence[int]) -> None:
        """They come as they are."""

    def next(self) -> Tensor:
        return self._pipe.get(timeout=self._timeout_s)

    def release(self) -> None:
        """The sender has no more use for it."""

    def close(self) -> None:
        """Garbage."""


def send(end: SendingEnd) -> Sender:
    return Sender(PipeSender(), end.bucket_bytes, end.post)


def receive(end: ReceivingEnd) -> PipeReceiver:
    return PipeReceiver(end.info["pipe"], end.timeout_s)


@pytest.fixture(autouse=True)
def with_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Transport(send=f"{__name__}:send", receive=f"{__name__}:receive", shares_gpus=True)
    monkeypatch.setitem(TRANSPORTS, "pipe", entry)


def test_an_added_transport_carries_weights_of_which_the_digests_agree():
    loaded: dict[str, Tensor] = {}

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        loaded.update({name: tensor.clone() for name, tensor in tensors})

    end = Loading(load)
    sender = table.open_sender("pipe", SendingEnd(end.post, 4096, 1, CPU, 5.0, "127.0.0.1"))
    info = sender.init_info | {"weight_sync_timeout_s": 5.0}
    end.receiver = Receiver(table.open_receiver(ReceivingEnd(info, 0, CPU)))
    named = [(f"layer.{n}", torch.randn(700 + n)) for n in range(5)]
    report = sender.send(specs_of(named), named)
    assert report.num_buckets == 5 and report.digests == end.digests
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named)
    sender.close()


def test_an_added_transport_may_be_named_and_is_refused_where_its_line_says(monkeypatch: pytest.MonkeyPatch):
    def problems(*overrides: str) -> list[str]:
        return list(transport_problems(load_config(["generator.weight_sync_backend=pipe", *overrides])))

    def chosen(**devices: Any) -> str:
        config = load_config(["generator.weight_sync_backend=pipe", "trainer.placement.colocate_all=true"])
        return sync_backend(config, Cluster("", is_local=True, **devices))

    assert problems("trainer.placement.colocate_all=true") == [] and chosen(has_gpus=False) == "pipe"
    (problem,) = problems()
    assert problem.startswith("generator.weight_sync_backend is pipe, which needs policy and engines on the same GPUs")
    monkeypatch.delitem(TRANSPORTS, "pipe")
    (problem,) = problems()
    assert (
        problem == "generator.weight_sync_backend is pipe: it must be one of auto, shm, broadcast, cuda_ipc, vllm_nccl"
    )
