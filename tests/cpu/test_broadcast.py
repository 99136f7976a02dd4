"""Weights through a process group of their own (gloo), one process per rank."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist

from skyrl_train.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from skyrl_train.weight_sync.digest import WeightSyncError

CPU = torch.device("cpu")
CONTEXT = multiprocessing.get_context("spawn")


def _worker(init_info, worker_rank, messages, answers, die_at):
    torch.set_num_threads(1)
    receiver = BroadcastReceiver(init_info, worker_rank, CPU)
    received, sums = {}, {}

    def load(named_tensors):
        sums.update({name: tensor.double().sum().item() for name, tensor in named_tensors})

    receiver.begin()
    while (message := messages.get()) is not None:
        if message == "again":
            receiver.begin()
            received.clear()
            continue
        if message["index"] == die_at:
            return
        received |= receiver.receive(message, load)
        answers.put(message["index"])
    answers.put((dict(received), sums))
    receiver.close()


class Workers:
    def __init__(self, count: int, die_at: int = -1) -> None:
        self.count, self.die_at = count, die_at
        self.messages = [CONTEXT.Queue() for _ in range(count)]
        self.answers = [CONTEXT.Queue() for _ in range(count)]
        self.processes = []

    def start(self, init_info) -> None:
        for rank in range(self.count):
            arguments = (init_info, rank, self.messages[rank], self.answers[rank], self.die_at)
            self.processes.append(CONTEXT.Process(target=_worker, args=arguments))
            self.processes[-1].start()

    def tell(self, message) -> None:
        for queue in self.messages:
            queue.put(message)

    def post(self, message):
        self.tell(message)
        return lambda: [queue.get(timeout=5) for queue in self.answers]

    def results(self):
        self.tell(None)
        results = [queue.get(timeout=30) for queue in self.answers]
        for process in self.processes:
            process.join(timeout=30)
        return results


@pytest.mark.slow
def test_every_worker_of_every_engine_receives_every_update():
    workers = Workers(3)
    sender = BroadcastSender(100_000, workers.post, world_size=4, device=CPU, timeout_s=20)
    workers.start(sender.init_info | {"rank_offset": 1})
    sender.connect()
    assert not dist.is_initialized()
    scratch = torch.empty(10_000)
    for update in (1, 2):
        report = sender.send((f"t{n}", scratch.fill_(n * update)) for n in range(30))
        assert report.num_buckets == 15
        if update == 1:
            workers.tell("again")
    for received, sums in workers.results():
        assert received == report.digests
        assert sums == {f"t{n}": 20_000.0 * n for n in range(30)}
    sender.close()


@pytest.mark.slow
def test_a_receiver_that_died_fails_the_send_within_the_deadline():
    workers = Workers(1, die_at=2)
    sender = BroadcastSender(1024, workers.post, world_size=2, device=CPU, timeout_s=5)
    workers.start(sender.init_info | {"rank_offset": 1})
    sender.connect()
    started = time.monotonic()
    with pytest.raises(Exception):  # noqa: B017  the queue's timeout or gloo's, whichever is first
        sender.send((f"t{n}", torch.zeros(256)) for n in range(10))
    assert time.monotonic() - started < 15
    with pytest.raises(WeightSyncError, match="build a new one"):
        sender.send([])
    for process in workers.processes:
        process.join(timeout=30)


@pytest.mark.slow
def test_connecting_without_receivers_fails_within_the_deadline():
    sender = BroadcastSender(1024, lambda message: lambda: None, world_size=2, device=CPU, timeout_s=2)
    started = time.monotonic()
    with pytest.raises(Exception, match="(?i)time"):
        sender.connect()
    assert time.monotonic() - started < 10
