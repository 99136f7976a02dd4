"""Weights through shared memory, between two processes and within one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from skyrl_train.weight_sync import shm
from skyrl_train.weight_sync.digest import WeightSyncError, tensor_digest
from skyrl_train.weight_sync.shm import FOLDER, PREFIX, ShmReceiver, ShmSender


def files() -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"{PREFIX}{os.getpid()}_*"))


def some_weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 32), (7,), (), (300, 41), (5, 1), (128, 128)]
    return [(f"layer.{n}", torch.randn(shape, generator=generator)) for n, shape in enumerate(shapes)]


class Loader:
    """Keeps copies of what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in named_tensors}


def directly_to(receiver: ShmReceiver, load: Callable, digests: dict[str, int]) -> Callable:
    def post(message):
        digests.update(receiver.receive(message, load))
        return lambda: None

    return post


@pytest.mark.parametrize("bucket_bytes", [1024, 5000, 1 << 20])
def test_every_tensor_arrives_with_the_digest_it_was_sent_with(bucket_bytes):
    receiver, load, received = ShmReceiver(), Loader(), {}
    sender = ShmSender(bucket_bytes, directly_to(receiver, load, received))
    for seed in (0, 1):
        received.clear()
        receiver.begin()
        report = sender.send(some_weights(seed))
        assert report.digests == received == {name: tensor_digest(tensor) for name, tensor in some_weights(seed)}
        assert all(torch.equal(load.tensors[name], tensor) for name, tensor in some_weights(seed))
        assert report.num_bytes == sum(tensor.numel() * 4 for _, tensor in some_weights())
    receiver.close()
    assert files() == []


def _receive(messages, answers):
    torch.set_num_threads(1)
    receiver, load, received = ShmReceiver(), Loader(), {}
    receiver.begin()
    while (message := messages.get()) is not None:
        received |= receiver.receive(message, load)
        answers.put(message["index"])
    answers.put((received, {name: tensor.sum().item() for name, tensor in load.tensors.items()}))


def test_another_process_receives_while_the_sender_overwrites_its_source():
    context = multiprocessing.get_context("spawn")
    messages, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(messages, answers))
    process.start()
    in_flight = []

    def post(message):
        messages.put(message)
        in_flight.append(message["index"])
        return lambda: in_flight.remove(answers.get(timeout=30))

    scratch = torch.empty(100_000)
    source = ((f"t{n}", scratch.fill_(n)) for n in range(40))
    report = ShmSender(1 << 20, post).send(source)
    assert in_flight == [] and report.num_buckets == 20
    messages.put(None)
    received, sums = answers.get(timeout=30)
    process.join(timeout=30)
    assert received == report.digests
    assert sums == {f"t{n}": n * 100_000 for n in range(40)}
    assert files() == []


def test_two_buckets_are_in_flight_and_no_more():
    open_buckets: set[int] = set()
    most = 0

    def post(message):
        nonlocal most
        open_buckets.add(message["index"])
        most = max(most, len(open_buckets))
        return lambda: open_buckets.remove(message["index"])

    ShmSender(1024, post).send([(f"t{n}", torch.zeros(256)) for n in range(7)])
    assert most == 2 and not open_buckets


def test_files_go_when_the_receiver_fails():
    def post(message):
        def fail():
            raise RuntimeError("the engine died")

        return fail

    with pytest.raises(RuntimeError, match="the engine died"):
        ShmSender(1024, post).send(some_weights())
    assert files() == []


def test_files_go_when_the_source_fails():
    def source():
        yield "a", torch.zeros(3)
        raise RuntimeError("conversion failed")

    with pytest.raises(RuntimeError, match="conversion failed"):
        ShmSender(1024, lambda message: lambda: None).send(source())
    assert files() == []


def test_a_name_that_is_exported_twice_is_refused():
    with pytest.raises(WeightSyncError, match="'a' twice"):
        ShmSender(1024, lambda message: lambda: None).send([("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_a_lost_bucket_is_noticed_at_the_next_one():
    receiver, load, received = ShmReceiver(), Loader(), {}
    post = directly_to(receiver, load, received)

    def lossy(message):
        return post(message) if message["index"] != 1 else (lambda: None)

    with pytest.raises(WeightSyncError, match="bucket 2 arrived where bucket 1 was due"):
        ShmSender(1024, lossy).send(some_weights())
    receiver.close()


def test_a_loader_that_keeps_a_view_is_refused():
    receiver, kept = ShmReceiver(), []

    def keep(named_tensors):
        kept.append(named_tensors[0][1][:2])

    with pytest.raises(WeightSyncError, match="must clone"):
        ShmSender(1 << 20, directly_to(receiver, keep, {})).send(some_weights())
    receiver.close()
    assert torch.isfinite(kept[0]).all()  # the kept view stays readable


def test_a_receiver_opens_nothing_but_buckets():
    message = {"transport": "shm", "index": 0, "num_bytes": 1024, "specs": [], "path": "/etc/passwd"}
    with pytest.raises(WeightSyncError, match="no weight bucket"):
        ShmReceiver().receive(message, Loader())


def test_a_bucket_on_another_host_is_an_error_that_says_what_to_do():
    message = {"transport": "shm", "index": 0, "num_bytes": 1024, "specs": [], "path": f"{FOLDER}/{PREFIX}1_ab"}
    with pytest.raises(WeightSyncError, match="weight_sync_backend=broadcast"):
        ShmReceiver().receive(message, Loader())


def test_no_room_in_shared_memory_is_an_error_that_says_what_to_do(monkeypatch):
    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="weight_sync_bucket_mb"):
        ShmSender(1024, lambda message: lambda: None).send(some_weights())
    assert files() == []


HELD = """
import sys, time, torch
from skyrl_train.weight_sync import shm
def post(message):
    print(message["path"], flush=True)
    time.sleep(60)
shm.ShmSender(1024, post).send([("a", torch.zeros(3))])
"""


def test_sweeping_removes_the_files_of_killed_senders_only():
    process = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    name = os.path.basename(path)
    assert name not in shm.sweep(min_age_s=0)
    assert os.path.exists(path)
    process.kill()
    process.wait()
    process.stdout.close()
    assert os.path.exists(path)
    assert name not in shm.sweep(min_age_s=3600)
    assert name in shm.sweep(min_age_s=0)
    assert not os.path.exists(path)


def test_buckets_are_capped_so_that_packing_and_loading_overlap():
    sizes = []

    def post(message):
        sizes.append(message["num_bytes"])
        return lambda: None

    started = time.perf_counter()
    ShmSender(1 << 30, post).send([(f"t{n}", torch.zeros(4 << 20, dtype=torch.uint8)) for n in range(10)])
    assert sizes == [32 << 20, 8 << 20]
    assert time.perf_counter() - started < 10
