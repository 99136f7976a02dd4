"""Weights through a process group of their own (gloo), one process per rank."""

from __future__ import annotations

import gc
import os
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from skyrl_train.weight_sync.channels import broadcast_group
from skyrl_train.weight_sync.channels.broadcast import BroadcastReceiveChannel, BroadcastSendChannel
from skyrl_train.weight_sync.channels.broadcast_group import BroadcastGroup
from skyrl_train.weight_sync.control import PeerLostError, WeightSyncError
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.lost_peers import CONTEXT, Processes, lose_receiver, lose_sender
from tests.support.sending import InThread, specs_of

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def _worker(init_info, worker_rank, messages, answers, die_at):
    torch.set_num_threads(1)
    """A message with the address of a sender connects it to that one instead."""
    receiver = Receiver(BroadcastReceiveChannel(init_info, worker_rank, CPU, 20))
    sums: dict[str, float] = {}

    def load(named_tensors):
        for name, tensor in named_tensors:
            if name == die_at and worker_rank == 0:
                os._exit(1)
            if tensor.isnan().any():
                raise RuntimeError(f"{name} is not a number")
            sums[name] = tensor.double().sum().item()

    while (message := messages.get()) is not None:
        if "transport" in message:
            receiver.close()
            receiver = Receiver(BroadcastReceiveChannel(message, 0, CPU, 20))
            continue
        try:
            answers.put((receiver.receive(message, load), dict(sums)))
        except Exception as error:
            answers.put(error)
    receiver.close()


class Workers:
    def __init__(self, count: int, die_at: str = "") -> None:
        self.count, self.die_at = count, die_at
        self.messages = [CONTEXT.Queue() for _ in range(count)]
        self.answers = [CONTEXT.Queue() for _ in range(count)]
        self.processes: list[Any] = []
        self.results: list[Any] = []

    def start(self, init_info) -> None:
        for rank in range(self.count):
            arguments = (init_info, rank, self.messages[rank], self.answers[rank], self.die_at)
            self.processes.append(CONTEXT.Process(target=_worker, args=arguments, daemon=True))
            self.processes[-1].start()

    def tell(self, message) -> None:
        for queue in self.messages:
            queue.put(message)

    def post(self, message):
        self.tell(message)
        self.results = []
        return self

    def check(self) -> None:
        for queue in self.answers:
            if not queue.empty():
                self.results.append(queue.get())
        for result in self.results:
            if isinstance(result, Exception):
                raise result

    def wait(self) -> None:
        while len(self.results) < self.count:
            time.sleep(0.01)
            self.check()

    def end(self):
        self.tell(None)
        for process in self.processes:
            process.join(timeout=30)
            process.kill()


def test_every_worker_of_every_engine_receives_every_update():
    workers = Workers(3)
    channel = BroadcastSendChannel(3, CPU, timeout_s=20)
    sender = Sender(channel, 100_000, workers.post)
    workers.start(sender.init_info | {"rank_offset": 1})
    sender.connect()
    assert not dist.is_initialized()
    scratch = torch.empty(2, 10_000)  # of a bucket
    specs = specs_of([(f"t{n}", scratch[0]) for n in range(30)])
    for update in (1, 2):
        report = sender.send(specs, ((f"t{n}", scratch[n % 2].fill_(n * update)) for n in range(30)))
        assert report.num_buckets == 15
        for digests, sums in workers.results:
            assert digests == report.digests
            assert sums == {f"t{n}": 10_000.0 * update * n for n in range(30)}
    workers.end()
    sender.close()


def test_a_receiver_that_fails_fails_the_send_soon():
    workers = Workers(1)
    sender = Sender(BroadcastSendChannel(1, CPU, timeout_s=60), 1024, workers.post)
    workers.start(sender.init_info | {"rank_offset": 1})
    sender.connect()
    started = time.monotonic()
    tensors = [(f"t{n}", torch.full((256,), float("nan"))) for n in range(10)]
    with pytest.raises(RuntimeError, match="is not a number"):
        sender.send(specs_of(tensors), tensors)
    assert time.monotonic() - started < 40
    with pytest.raises(WeightSyncError, match="build a new one"):
        sender.send([], [])
    workers.end()


def test_when_one_receiver_dies_the_other_continues_with_the_next_sender():
    workers = Workers(2, die_at="t5")
    broken = Sender(BroadcastSendChannel(2, CPU, timeout_s=60), 1024, workers.post)
    workers.start(broken.init_info | {"rank_offset": 1})
    broken.connect()
    tensors = [(f"t{n}", torch.full((256,), 1.0 + n)) for n in range(10)]
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="a broadcast of weights failed|gave up this weight update"):
        broken.send(specs_of(tensors), tensors)
    assert isinstance(workers.answers[1].get(timeout=40), WeightSyncError)
    assert time.monotonic() - started < 40, "nobody may wait for the deadline"
    broken.close()

    workers.count, workers.messages, workers.answers = 1, workers.messages[1:], workers.answers[1:]
    sender = Sender(BroadcastSendChannel(1, CPU, timeout_s=20), 1024, workers.post)
    workers.tell(sender.init_info | {"rank_offset": 1})
    sender.connect()
    report = sender.send(specs_of(tensors), tensors)
    assert workers.results == [(report.digests, {f"t{n}": 256 * (1.0 + n) for n in range(10)})]
    workers.end()
    sender.close()


class _Nobody:
    """Receiver that stays silent."""

    def check(self) -> None:
        pass

    def wait(self) -> None:
        pass


def _held() -> dict[str, int]:
    """What weights on their way take in this process."""
    gc.collect()
    process, tensors = psutil.Process(), [one for one in gc.get_objects() if type(one) is torch.Tensor]
    groups = [one for one in gc.get_objects() if isinstance(one, BroadcastGroup)]
    return {
        "threads": process.num_threads(),
        "sockets": len(process.net_connections()),
        "buffers": sum(one.nbytes for one in tensors if one.dtype == torch.uint8),
        "groups": len(groups),
    }


def _fail_then_receive(to_parent: Any) -> None:
    """Through a pipe: a queue has a thread."""
    torch.set_num_threads(1)

    def load(named_tensors):
        raise RuntimeError("no such parameter")

    before = _held()
    receiver = Receiver(BroadcastReceiveChannel(to_parent.recv(), 0, CPU, 20))
    assert _held() != before
    message = to_parent.recv()
    try:
        receiver.receive(message, load)
    except RuntimeError as error:
        to_parent.send(str(error))
    ended = time.monotonic() + 2
    while (left := _held()) != before and time.monotonic() < ended:
        time.sleep(0.05)
    to_parent.send((before, left))
    try:
        receiver.receive(message, load)
    except WeightSyncError as error:
        to_parent.send(str(error))
    receiver = Receiver(BroadcastReceiveChannel(to_parent.recv(), 0, CPU, 20))
    to_parent.send(receiver.receive(to_parent.recv(), lambda named_tensors: None))


def test_a_load_that_fails_leaves_nothing_of_the_update_and_the_next_connection_works():
    tensors = [(f"t{n}", torch.full((1 << 20,), 1.0 + n)) for n in range(8)]  # more than sockets take in unread
    child, to_parent = CONTEXT.Pipe()
    with Processes() as processes:
        processes.start(_fail_then_receive, to_parent)

        def post(message):
            child.send(message)
            return _Nobody()

        def send() -> dict[str, int]:
            sender = Sender(BroadcastSendChannel(1, CPU, 20), 4 << 20, post)
            child.send(sender.init_info | {"rank_offset": 1})
            sender.connect()
            try:
                return sender.send(specs_of(tensors), tensors).digests
            finally:
                sender.close()

        with pytest.raises(WeightSyncError, match="a broadcast of weights failed"):
            send()
        assert child.recv() == "no such parameter"
        before, left = child.recv()
        assert left == before
        assert "closed by a failed update" in child.recv()
        digests = send()
        assert child.poll(20) and child.recv() == digests


def test_receivers_learn_from_the_store_that_the_sync_has_ended(monkeypatch: pytest.MonkeyPatch):
    """As under NCCL, where nobody notices that a peer has left: the groups are not closed here. A receiver that waited
    for its deadline would not say in time that its engine lives."""
    channels: list[BroadcastReceiveChannel] = []
    receivers: list[InThread] = []

    def post(message):
        for channel in channels:
            receivers.append(InThread(lambda channel=channel: Receiver(channel).receive(message, lambda tensors: None)))
        return _Nobody()

    channel = BroadcastSendChannel(2, CPU, 20)
    sender = Sender(channel, 1024, post)
    infos = [channel.init_info | {"rank_offset": rank} for rank in (1, 2)]
    joins = [InThread(lambda info=info: BroadcastReceiveChannel(info, 0, CPU, 20)) for info in infos]  # type: ignore[misc]
    sender.connect()
    for join in joins:
        join.wait()
        channels.append(join.result)
    groups = [end._group for end in (channel, *channels)]
    tensors = [(f"t{n}", torch.ones(256)) for n in range(2)]

    def source():
        yield tensors[0]
        time.sleep(0.3)
        raise RuntimeError("conversion failed")

    closed: list[BroadcastGroup] = []
    with monkeypatch.context() as patch:
        patch.setattr(BroadcastGroup, "close", lambda group: closed.append(group))
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="conversion failed"):
            sender.send(specs_of(tensors), source())
        for receiver in receivers:
            with pytest.raises(WeightSyncError, match="the sender gave up this weight update"):
                receiver.wait()
        assert time.monotonic() - started < 15
    for group in groups:
        assert group in closed, (
            "under NCCL its kernel would keep running, and block every process that waits for the device"
        )
        assert group is not None
        group.close()
        group.close()


class _Enqueued:
    """A broadcast whose `wait` returns at once, as NCCL's does: only the device waits."""

    def __init__(self, work: dist.Work) -> None:
        self.is_completed = work.is_completed

    def wait(self) -> None:
        pass


def test_both_ends_wait_for_a_broadcast_on_the_host(monkeypatch: pytest.MonkeyPatch):
    """A process that leaves that to the device never notices a dead peer."""
    land = BroadcastGroup._land
    monkeypatch.setattr(BroadcastGroup, "_land", lambda self, work, check: land(self, _Enqueued(work), check))
    channel = BroadcastSendChannel(1, CPU, 20)
    seen: list[int] = []
    ends: list[BroadcastReceiveChannel] = []
    size = 8 << 20  # more than a socket takes in unread

    def receive() -> None:
        end = BroadcastReceiveChannel(channel.init_info | {"rank_offset": 1}, 0, CPU, 20)
        ends.append(end)
        end.begin([size] * 6)
        seen.append(int(end.next()[0]))

    receiver = InThread(receive)
    channel.connect(lambda: None)
    channel.begin()
    time.sleep(0.5)
    for value in (7, 8, 9, 10):
        channel.buffer(size, lambda: None).fill_(value)
        channel.publish(size)
    receiver.wait()
    assert seen == [7], "the bucket was handed out before it had come"

    def check() -> None:
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        channel.buffer(size, check)  # in place of the third, which the receiver did not ask for
    channel.close()
    ends[0].close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["gives up", "is killed"])
def test_a_receiver_that_reads_on_the_host_notices_a_dead_sender_and_continues_with_the_next(is_killed: bool):
    said = lose_sender("cpu", "cpu", is_killed)
    assert any(words in said for words in ("gave up this weight update", "died during", "failed")), said


def test_a_sender_that_reads_what_it_sends_notices_a_dead_receiver_and_continues_with_the_next():
    assert lose_receiver("cpu", "cpu") == "the engine died"


def _come_and_leave(port: int, rank: int) -> None:
    store = dist.PrefixStore("weights", dist.TCPStore("127.0.0.1", port, is_master=False))
    store.set(f"came {rank}", "")


def test_a_receiver_that_comes_and_ends_before_it_is_connected_fails_the_others_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast_group, "CONNECT_S", 1.0)
    channel = BroadcastSendChannel(2, CPU, 60, "127.0.0.1")
    receiver = InThread(lambda: BroadcastReceiveChannel(channel.init_info | {"rank_offset": 1}, 0, CPU, 60))
    started = time.monotonic()
    _come_and_leave(channel.init_info["port"], rank=2)
    with pytest.raises(PeerLostError, match="not all senders and receivers of weights could be connected"):
        channel.connect(lambda: None)
    with pytest.raises(PeerLostError):  # the sender may be the one that it cannot reach
        receiver.wait()
    assert time.monotonic() - started < 40, "an engine that connects does not say that it lives"
    channel.close()


def test_a_connected_receiver_waits_longer_for_a_bucket_than_for_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast_group, "CONNECT_S", 1.0)
    channel = BroadcastSendChannel(1, CPU, 20, "127.0.0.1")

    def receive() -> int:
        end = BroadcastReceiveChannel(channel.init_info | {"rank_offset": 1}, 0, CPU, 20)
        end.begin([1])
        first = int(end.next()[0])
        end.close()
        return first

    receiver = InThread(receive)
    channel.connect(lambda: None)
    channel.begin()
    time.sleep(2.5)
    channel.buffer(1, lambda: None).fill_(7)
    channel.publish(1)
    receiver.wait()
    assert receiver.result == 7
    channel.drain(lambda: None)
    channel.close()


def test_connecting_without_receivers_fails_within_the_deadline():
    sender = Sender(BroadcastSendChannel(1, CPU, timeout_s=2), 1024, lambda message: Workers(0))
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="not all senders and receivers of weights joined within 2 s"):
        sender.connect()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("spin_s", "naps"), [(0.0, []), (0.0045, [0.0] * 5)])
def test_a_wait_sleeps_only_after_it_has_polled_for_a_while(
    spin_s: float, naps: list[float], monkeypatch: pytest.MonkeyPatch
):
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds or 0.001

    monkeypatch.setattr(broadcast_group, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    broadcast_group.wait_until(lambda: now > 0.0095, 0.002, 10, "late", lambda: None, spin_s)
    assert slept[: len(naps)] == naps and set(slept[len(naps) + 1 :]) == {0.002}
