"""A sender and receivers of weights meet, each a process of its own (gloo), and one of them is lost, or only slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skyrl_train.weight_sync.channels.broadcast import BroadcastReceiveChannel, BroadcastSendChannel
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.transport import Sender
from tests.support.lost_peers import CONTEXT, DEADLINE_S, START_S, Processes
from tests.support.sending import InThread

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SOON_S = 30.0
"""For what takes a moment: half of the deadline that would be waited for otherwise."""


def _send(receivers: int, infos: Any) -> None:
    channel = BroadcastSendChannel(receivers, CPU, DEADLINE_S, "127.0.0.1")
    infos.put(channel.init_info)
    Sender(channel, 1024, lambda message: pytest.fail("nothing is sent")).connect()


def _receive(info: Any, said: Any) -> None:
    torch.set_num_threads(1)
    said.put("comes")
    try:
        BroadcastReceiveChannel(info, 0, CPU, DEADLINE_S).close()
        said.put("met")
    except WeightSyncError as error:
        said.put(str(error))


class Receivers:
    """Processes of receivers, and what each of them says."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.started: list[Any] = []
        self.said: list[Any] = []

    def start(self, info: Any) -> None:
        self.said.append(CONTEXT.Queue())
        receiver = info | {"rank_offset": len(self.said)}
        self.started.append(self._processes.start(_receive, receiver, self.said[-1]))

    def wait_until_they_wait(self) -> None:
        """A moment longer than it takes to come."""
        assert [said.get(timeout=START_S) for said in self.said] == ["comes"] * len(self.said)
        time.sleep(1.0)
        assert all(said.empty() for said in self.said)

    def check(self) -> None:
        """As Ray tells of an engine whose process has ended."""
        if any(process.exitcode not in (None, 0) for process in self.started):
            raise WeightSyncError("an engine died")


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    with Processes() as processes:
        yield Receivers(processes)


def test_when_a_receiver_dies_the_others_do_not_wait_for_it_nor_for_those_still_to_come(receivers: Receivers):
    channel = BroadcastSendChannel(3, CPU, DEADLINE_S, "127.0.0.1")
    sender = Sender(channel, 1024, lambda message: pytest.fail("nothing is sent"))
    receivers.start(channel.init_info)
    receivers.start(channel.init_info)
    connecting = InThread(lambda: sender.connect(receivers.check))
    receivers.wait_until_they_wait()
    receivers.started[1].kill()
    killed = time.monotonic()
    with pytest.raises(WeightSyncError, match="an engine died"):
        connecting.wait()
    assert "gave up" in receivers.said[0].get(timeout=SOON_S)
    assert time.monotonic() - killed < SOON_S
    receivers.start(channel.init_info)
    assert receivers.said[2].get(timeout=START_S) == "comes"
    assert "gave up" in receivers.said[2].get(timeout=SOON_S), "a late process waits for none"
    sender.close()


def test_when_the_sender_dies_neither_those_that_wait_nor_one_that_comes_later_wait_for_it(receivers: Receivers):
    infos = CONTEXT.Queue()
    sender = receivers._processes.start(_send, 3, infos)
    info = infos.get(timeout=START_S)
    receivers.start(info)
    receivers.start(info)
    receivers.wait_until_they_wait()
    sender.kill()
    killed = time.monotonic()
    for said in receivers.said:
        assert "the sender of the weights died" in said.get(timeout=SOON_S)
    assert time.monotonic() - killed < SOON_S
    receivers.start(info)
    assert receivers.said[2].get(timeout=START_S) == "comes"
    assert "it died" in receivers.said[2].get(timeout=SOON_S)


def test_a_peer_that_is_slow_or_stalls_for_a_while_is_waited_for(receivers: Receivers):
    channel = BroadcastSendChannel(2, CPU, DEADLINE_S, "127.0.0.1")
    sender = Sender(channel, 1024, lambda message: pytest.fail("nothing is sent"))
    receivers.start(channel.init_info)
    connecting = InThread(lambda: sender.connect(receivers.check))
    receivers.wait_until_they_wait()
    slow = receivers.started[0].pid
    os.kill(slow, signal.SIGSTOP)
    receivers.start(channel.init_info)
    assert receivers.said[1].get(timeout=START_S) == "comes"
    time.sleep(2.0)
    assert receivers.said[1].empty() and connecting.error is None
    os.kill(slow, signal.SIGCONT)
    assert [said.get(timeout=SOON_S) for said in receivers.said] == ["met", "met"]
    connecting.wait()
    sender.close()


@pytest.mark.parametrize(
    "open_channel", [lambda: BroadcastSendChannel(1, CPU, DEADLINE_S), lambda: ShmSendChannel(1, DEADLINE_S)]
)
def test_a_sender_does_not_wait_for_an_engine_that_dies_before_it_comes(open_channel: Callable[[], Any]):
    def check() -> None:
        raise WeightSyncError("an engine died")

    sender = Sender(open_channel(), 1024, lambda message: pytest.fail("nothing is sent"))
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="an engine died"):
        sender.connect(check)
    assert time.monotonic() - started < SOON_S
    sender.close()
