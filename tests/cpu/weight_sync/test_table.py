"""A transport of one's own, named as module:attribute, is checked, opened and carries weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from skyrl_train.weight_sync.channels.table import Transport
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import compare
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.sending import ReceivingEnd as Loading
from tests.support.sending import specs_of

CPU = torch.device("cpu")
OWN = "own_transport:FILES"
NAMED = [(f"layer.{n}", torch.randn(700 + n)) for n in range(5)]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples/custom"))
    yield
    sys.modules.pop("own_transport", None)


class Ends:
    """Both ends of the example transport in this process."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.end = Loading(lambda tensors: self.loaded.update({name: tensor.clone() for name, tensor in tensors}))
        sending = SendingEnd(self.end.post, 4096, 1, CPU, timeout_s, "127.0.0.1")
        sender = table.open_sender(OWN, sending)
        assert isinstance(sender, Sender)
        self.sender = sender
        info = {"transport": OWN, "weight_sync_timeout_s": timeout_s} | sender.init_info
        self.folder = Path(info["folder"])
        self.end.receiver = Receiver(table.open_receiver(ReceivingEnd(info, 0, CPU)))


def test_the_example_transport_carries_updates_of_which_the_digests_agree():
    ends = Ends()
    for update in range(3):
        named = [(name, tensor + update) for name, tensor in NAMED]
        report = ends.sender.send(specs_of(named), named)
        assert report.num_buckets == 5
        compare(report.digests, ends.end.digests)
        assert all(torch.equal(ends.loaded[name], tensor) for name, tensor in named)
    ends.sender.close()
    assert not ends.folder.exists()


def test_the_digests_find_a_byte_that_the_example_transport_changes(monkeypatch: pytest.MonkeyPatch):
    ends = Ends()
    read = torch.from_file

    def misread(*args: Any, **kwargs: Any) -> Tensor:
        data = read(*args, **kwargs)
        data[5] ^= 1
        return data

    monkeypatch.setattr(torch, "from_file", misread)
    report = ends.sender.send(specs_of(NAMED), NAMED)
    with pytest.raises(WeightSyncError, match="5 arrived with other bytes: layer.0"):
        compare(report.digests, ends.end.digests)


def test_a_receiver_of_the_example_transport_waits_no_longer_than_the_sender_lives_and_the_deadline():
    ends = Ends(timeout_s=0.2)
    assert ends.end.receiver is not None
    message = {"bucket_bytes": 4096, "specs": [spec.to_message() for spec in specs_of(NAMED)]}
    with pytest.raises(WeightSyncError, match="was not written within 0.2 s"):
        ends.end.receiver.receive(message, lambda tensors: None)
    ends = Ends()
    ends.sender.close()
    assert ends.end.receiver is not None
    with pytest.raises(WeightSyncError, match="gave up"):
        ends.end.receiver.receive(message, lambda tensors: None)


def problems(name: str, *overrides: str) -> list[str]:
    return list(transport_problems(load_config([f"generator.weight_sync_backend={name}", *overrides])))


def named(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    ends: dict[str, Any] = {"send": "own_transport:send", "receive": "own_transport:receive"}
    entry = SimpleNamespace(ENTRY=Transport(**(ends | fields)), NUMBER=3, __file__="mine.py")
    monkeypatch.setitem(sys.modules, "mine", entry)  # type: ignore[arg-type]
    return "mine:ENTRY"


def test_a_transport_of_ones_own_is_refused_where_its_entry_says(monkeypatch: pytest.MonkeyPatch):
    name, shared = named(monkeypatch, shares_gpus=True), "trainer.placement.colocate_all=true"
    config = load_config([f"generator.weight_sync_backend={name}", shared])
    assert problems(OWN) == problems(name, shared) == []
    assert sync_backend(config, Cluster("", is_local=True, has_gpus=False)) == name
    (problem,) = problems(name)
    assert problem.startswith(f"generator.weight_sync_backend is {name}: it needs policy and engines on the same")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("pipe", {}, "is pipe: it must be one of auto, shm, broadcast, cuda_ipc, vllm_nccl, or `module:attribute` of"),
        ("nowhere:FILES", {}, "is 'nowhere:FILES', and nowhere cannot be imported (ModuleNotFoundError"),
        ("own_transport:PIPE", {}, "is 'own_transport:PIPE', and own_transport ("),
        (
            "mine:NUMBER",
            {},
            "is mine:NUMBER: it is a int. Make it a Transport of skyrl_train.weight_sync.channels.table",
        ),
        ("mine:ENTRY", {"scope": "all"}, "its scope is all, allowed are own_stage, first_stage, every_stage"),
        ("mine:ENTRY", {"send": "own_transport:sent"}, "send of generator.weight_sync_backend=mine:ENTRY is"),
        ("mine:ENTRY", {"receive": "own_transport:FILES"}, "is 'own_transport:FILES': it is not a function"),
    ],
)
def test_what_is_no_transport_is_named_at_the_check(
    name: str, fields: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
):
    named(monkeypatch, **fields)
    (problem,) = problems(name)
    assert said in problem
