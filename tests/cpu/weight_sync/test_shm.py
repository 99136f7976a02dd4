"""Weights through shared memory, between two processes and within one."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from skyrl_train.weight_sync import digest
from skyrl_train.weight_sync.channels import signals
from skyrl_train.weight_sync.channels.shm import ShmReceiveChannel, ShmSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import row_hashes
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.lost_peers import CONTEXT
from tests.support.sending import InThread, Named, ReceivingEnd, specs_of, tensor_digest

TIMEOUT_S = 5.0


def open_memory() -> list[str]:
    """The pieces of shared memory that this process has open."""
    links = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)]
    return [link for link in links if "memfd:skyrl_sync" in link]


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


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


class Pair:
    """A sender and a receiver of this process."""

    def __init__(self, bucket_bytes: int, load) -> None:
        self.end = ReceivingEnd(load)
        self.channel = ShmSendChannel(1, TIMEOUT_S)
        self.sender = Sender(self.channel, bucket_bytes, self.end.post)
        joined = InThread(self.sender.connect)
        self.end.receiver = Receiver(ShmReceiveChannel(self.sender.init_info, TIMEOUT_S))
        joined.wait()

    def send(self, named_tensors: Named):
        return self.sender.send(specs_of(named_tensors), named_tensors)

    def close(self) -> None:
        self.sender.close()
        assert self.end.receiver is not None
        self.end.receiver.close()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of sockets are looked for in one of this test's own: other programs of the machine have some too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("skyrl_train.weight_sync.channels.signals.FOLDERS", folder)
        yield
        gc.collect()  # views in the stack of an expected error
        assert open_memory() == []
        assert not os.listdir(folder)


@pytest.mark.parametrize("bucket_bytes", [1024, 5000, 1 << 20])
def test_every_tensor_arrives_with_the_digest_it_was_sent_with(bucket_bytes):
    load = Loader()
    pair = Pair(bucket_bytes, load)
    for seed in (0, 1, 2):
        report = pair.send(some_weights(seed))
        assert report.digests == pair.end.digests == {n: tensor_digest(tensor) for n, tensor in some_weights(seed)}
        assert all(torch.equal(load.tensors[name], tensor) for name, tensor in some_weights(seed))
        assert report.num_bytes == sum(tensor.numel() * 4 for _, tensor in some_weights())
    pair.close()


def test_both_ends_launch_the_kernels_of_the_digest_when_they_connect(monkeypatch: pytest.MonkeyPatch):
    """The first launch in a process takes half a second, for which an engine would be paused."""
    launches: list[torch.Tensor] = []

    def counted(data: torch.Tensor) -> torch.Tensor:
        launches.append(data)
        return row_hashes(data)

    monkeypatch.setattr(digest, "row_hashes", counted)
    pair = Pair(4096, Loader())
    assert len(launches) == 2
    pair.close()


def test_another_update_may_have_other_tensors():
    load = Loader()
    pair = Pair(4096, load)
    pair.send(some_weights())
    pair.send(some_weights()[1:])
    large = [("large", torch.arange(50_000.0))]
    pair.send(large)
    assert torch.equal(load.tensors["large"], large[0][1])
    pair.close()


def _receive(init_info, messages, answers):
    torch.set_num_threads(1)
    load = Loader()
    receiver = Receiver(ShmReceiveChannel(init_info, 30))
    while (message := messages.get()) is not None:
        digests = receiver.receive(message, load)
        answers.put((digests, {name: tensor.sum().item() for name, tensor in load.tensors.items()}))


class Process:
    """A receiver in another process."""

    def __init__(self, init_info) -> None:
        self.messages, self.answers = CONTEXT.Queue(), CONTEXT.Queue()
        self.process = CONTEXT.Process(target=_receive, args=(init_info, self.messages, self.answers), daemon=True)
        self.process.start()
        self.answer = None

    def post(self, message):
        self.messages.put(message)
        return self

    def check(self) -> None:
        pass

    def wait(self) -> None:
        self.answer = self.answers.get(timeout=30)


def test_another_process_receives_while_the_sender_overwrites_its_source():
    channel = ShmSendChannel(1, 60)
    process = Process(channel.init_info)
    sender = Sender(channel, 1 << 20, process.post)
    sender.connect()
    scratch = torch.empty(2, 100_000)  # of a bucket
    for update in (1, 2):
        source = ((f"t{n}", scratch[n % 2].fill_(n * update)) for n in range(40))
        report = sender.send(specs_of([(f"t{n}", scratch[0]) for n in range(40)]), source)
        assert report.num_buckets == 20
        digests, sums = process.answer
        assert digests == report.digests
        assert sums == {f"t{n}": n * update * 100_000 for n in range(40)}
    process.messages.put(None)
    process.process.join(timeout=30)
    sender.close()


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 40), (signal.SIGSTOP, 40)])
def test_a_receiver_that_dies_or_hangs_fails_the_send(number, within_s):
    channel = ShmSendChannel(1, 60)
    process = Process(channel.init_info)
    sender = Sender(channel, 4096, process.post)
    sender.connect()
    channel._timeout_s = TIMEOUT_S

    def source():
        for n in range(100):
            if n == 20:
                os.kill(process.process.pid, number)
            yield f"t{n}", torch.zeros(1024)

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="died during|not loaded within 5 s"):
        sender.send(specs_of([(f"t{n}", torch.zeros(1024)) for n in range(100)]), source())
    assert time.monotonic() - started < within_s
    sender.close()
    process.process.kill()


def test_two_buckets_are_in_flight_while_the_tensors_of_a_third_wait():
    loading, produced = threading.Event(), []

    def load(named_tensors):
        loading.wait(timeout=10)

    def source():
        for n in range(7):
            produced.append(n)
            yield f"t{n}", torch.zeros(256)

    pair = Pair(1024, load)
    sending = InThread(lambda: pair.sender.send(specs_of([(f"t{n}", torch.zeros(256)) for n in range(7)]), source()))
    time.sleep(0.3)
    assert produced == [0, 1, 2]
    loading.set()
    sending.wait()
    assert len(produced) == 7
    pair.close()


def test_a_failing_receiver_says_why_and_both_ends_have_to_reconnect():
    def load(named_tensors):
        raise RuntimeError("no such parameter")

    pair = Pair(1024, load)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no such parameter"):
        pair.send(some_weights())
    assert time.monotonic() - started < TIMEOUT_S
    with pytest.raises(WeightSyncError, match="closed by a failed update"):
        pair.send(some_weights())
    pair.close()


def test_a_failing_source_ends_the_receiver():
    def source():
        yield "a", torch.zeros(3)
        raise RuntimeError("conversion failed")

    pair = Pair(1024, Loader())
    with pytest.raises(RuntimeError, match="conversion failed"):
        pair.sender.send(specs_of([("a", torch.zeros(3)), ("b", torch.zeros(3))]), source())
    with pytest.raises(WeightSyncError, match="gave up"):
        pair.end.received.wait()
    pair.close()


def test_a_tensor_that_was_not_announced_is_refused():
    pair = Pair(1024, Loader())
    with pytest.raises(WeightSyncError, match="exports b, which is not in its specs"):
        pair.sender.send(specs_of([("a", torch.zeros(3))]), [("a", torch.zeros(3)), ("b", torch.zeros(3))])
    pair.close()


def test_a_name_that_is_exported_twice_is_refused():
    pair = Pair(1024, Loader())
    with pytest.raises(WeightSyncError, match="'a' twice"):
        pair.send([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    pair.close()


def test_a_lost_bucket_is_noticed_at_the_next_one(monkeypatch):
    pair = Pair(1024, Loader())
    notify = pair.channel.notify
    monkeypatch.setattr(pair.channel, "notify", lambda bucket, **more: bucket == 1 or notify(bucket, **more))
    with pytest.raises(WeightSyncError, match="received bucket 2, expected 1"):
        pair.send([(f"t{n}", torch.zeros(256)) for n in range(7)])
    pair.close()


def test_a_loader_that_keeps_a_view_is_refused():
    kept = []
    pair = Pair(1 << 20, lambda named_tensors: kept.append(named_tensors[0][1][:2]))
    with pytest.raises(WeightSyncError, match="must clone"):
        pair.send(some_weights())
    pair.close()
    assert torch.isfinite(kept[0]).all()  # the kept view stays readable


def test_a_sender_on_another_host_is_an_error_that_says_what_to_do():
    with pytest.raises(WeightSyncError, match="weight_sync_backend=broadcast"):
        ShmReceiveChannel({"address": "/tmp/skyrl_sync_nobody/socket"}, 1)


def test_receivers_that_do_not_connect_are_counted():
    channel = ShmSendChannel(2, 0.2)
    with pytest.raises(WeightSyncError, match="2 of 2 workers"):
        channel.connect(lambda: None)
    channel.close()


def test_no_memory_for_a_bucket_is_an_error_that_says_what_to_do(monkeypatch):
    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pair = Pair(1024, Loader())
    with pytest.raises(WeightSyncError, match="weight_sync_bucket_mb"):
        pair.send(some_weights())
    pair.close()


def test_a_bucket_that_cannot_be_mapped_fails_with_the_reason_and_leaves_nothing_open(monkeypatch):
    pair = Pair(4 << 20, Loader())
    pair.send([(f"t{n}", torch.zeros(256)) for n in range(2)])
    map_memory = mmap.mmap

    def full(descriptor, num_bytes):
        if threading.current_thread() is threading.main_thread():  # the sender's
            return map_memory(descriptor, num_bytes)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pair.send([("larger", torch.zeros(1 << 19))])  # takes a new piece in the slot of the one before
    pair.close()


def test_the_kernel_frees_the_memory_of_a_killed_sender():
    held = "import torch, time; from skyrl_train.weight_sync.channels.shm import ShmSendChannel as C; c = C(1, 5); "
    held += "c._stop_listening(); c.begin(); c.buffer(1 << 30, lambda: None); "
    held += "print('held', flush=True); time.sleep(60)"
    before = shared_bytes()
    process = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert shared_bytes() - before > 0.9 * (1 << 30)
    process.kill()
    process.wait()
    process.stdout.close()
    assert shared_bytes() - before < 0.5 * (1 << 30)


def test_folders_of_senders_that_were_killed_long_ago_are_removed():
    parent = Path(signals.FOLDERS)
    for age_s, name in ((10, "skyrl_sync_young"), (5000, "skyrl_sync_old"), (5000, "of_others")):
        (parent / name).mkdir()
        os.utime(parent / name, (time.time() - age_s,) * 2)
    channel = ShmSendChannel(1, TIMEOUT_S)
    channel.close()
    assert sorted(os.listdir(parent)) == ["of_others", "skyrl_sync_young"]
    for name in os.listdir(parent):
        (parent / name).rmdir()


def shared_bytes() -> int:
    """Shared memory in use on this machine."""
    return psutil.virtual_memory().shared


def test_buckets_are_capped_so_that_packing_and_loading_overlap():
    sizes = []
    pair = Pair(1 << 30, lambda named_tensors: sizes.append(sum(t.nbytes for _, t in named_tensors)))
    pair.send([(f"t{n}", torch.zeros(4 << 20, dtype=torch.uint8)) for n in range(10)])
    assert sizes == [32 << 20, 8 << 20]
    pair.close()
