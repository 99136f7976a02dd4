"""A sender and a receiver of weights, each a process of its own, of which one is lost in the middle of an update.

What both do on the side is what the real ones do: the receiver reads each bucket on the host, as the trial of a copy
plan and an adapter's update do, and the sender reads its tensors, as the check against the live weights does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import torch

from skyrl_train.weight_sync.channels.broadcast import BroadcastReceiveChannel, BroadcastSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.transport import Receiver, Sender
from tests.support.sending import specs_of

CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
"""Without GPUs, children of a process that has imported torch: each takes 0.1 s instead of 3 of CPU."""
TENSORS, NUMBERS = 8, 1 << 16
BUCKET_BYTES = 4 * NUMBERS
EXPECTED = {f"t{n}": float(n) for n in range(TENSORS)}
DEADLINE_S = 60.0
"""Of both ends; what is tested is that nobody waits for it."""
START_S = 120.0
SOON_S = 10.0


def _use(device: str) -> torch.device:
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    return torch.device(device)


@contextmanager
def fork_server() -> Iterator[None]:
    """The server of CONTEXT's processes ends with this block, before other tests count this process's children."""
    multiprocessing.set_forkserver_preload(["torch", __name__])
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


class _Ends:
    """What the engine's side says of an update, to any process: it has taken all of it, or it has died."""

    def __init__(self) -> None:
        self.taken, self.lost = CONTEXT.Event(), CONTEXT.Event()


class _Posted:
    def __init__(self, messages: Any, message: Any, ends: _Ends) -> None:
        self._ends = ends
        messages.put(message)

    def check(self) -> None:
        if self._ends.lost.is_set():
            raise WeightSyncError("the engine died")

    def wait(self) -> None:
        # To have sent a bucket is not that it was received: NCCL keeps small ones for a peer that has not asked yet.
        while not self._ends.taken.wait(0.05):
            self.check()


def _send(device_name: str, messages: Any, stops: list[int], commands: Any, results: Any, ends: list[_Ends]) -> None:
    """One update for each stop: before that tensor a command says how it continues."""
    device = _use(device_name)
    for stop, end in zip(stops, ends, strict=True):
        channel = BroadcastSendChannel(1, device, DEADLINE_S, "127.0.0.1")
        messages.put(channel.init_info | {"rank_offset": 1})
        sender = Sender(channel, BUCKET_BYTES, lambda message, end=end: _Posted(messages, message, end))  # type: ignore[misc]
        sender.connect()
        tensors = [(name, torch.full((NUMBERS,), value, device=device)) for name, value in EXPECTED.items()]

        def read(tensors: Any = tensors, stop: int = stop) -> Iterator[tuple[str, torch.Tensor]]:
            for n, (name, tensor) in enumerate(tensors):
                if n == stop and commands.get() == "fail":
                    raise RuntimeError("the trainer failed")
                assert tensor.mean().item() == n
                yield name, tensor

        try:
            report = sender.send(specs_of(tensors), read())
            results.put(f"sent {report.num_buckets} buckets")
        except RuntimeError as error:
            sender.close()
            results.put(str(error))
    commands.get()


def _receive(device_name: str, messages: Any, die_at: str, results: Any, end: _Ends) -> None:
    device = _use(device_name)
    receiver: Receiver | None = None
    while (message := messages.get()) is not None:
        if "transport" in message:
            if receiver is not None:
                receiver.close()
            receiver = Receiver(BroadcastReceiveChannel(message, 0, device, DEADLINE_S))
            continue
        assert receiver is not None
        found: dict[str, float] = {}

        def load(named_tensors: Any, found: dict[str, float] = found) -> None:
            for name, tensor in named_tensors:
                if name == die_at:
                    os.kill(os.getpid(), 9)
                found[name] = tensor.mean().item()
            results.put(len(found))

        try:
            receiver.receive(message, load)
            end.taken.set()
            results.put(found)
        except WeightSyncError as error:
            if device.type == "cuda":
                torch.cuda.synchronize()
            time.sleep(2.0)  # time for torch to end the process, which it must not
            results.put(str(error))


class Processes:
    """Ended when the block ends, also those that hang."""

    def __init__(self) -> None:
        self._started: list[Any] = []

    def __enter__(self) -> Processes:
        return self

    def start(self, target: Any, *args: Any) -> Any:
        process = CONTEXT.Process(target=target, args=args, daemon=True)
        process.start()
        self._started.append(process)
        return process

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.join()


def lose_sender(sender_on: str, receiver_on: str, is_killed: bool) -> str:
    """A sender fails, or is killed, after two buckets; another one then sends everything. Returns: what the receiver
    said."""
    messages, words, end = CONTEXT.Queue(), CONTEXT.Queue(), _Ends()
    with Processes() as processes:
        processes.start(_receive, receiver_on, messages, "", words, end)
        commands, results = CONTEXT.Queue(), CONTEXT.Queue()
        sender = processes.start(_send, sender_on, messages, [2], commands, results, [end])
        assert [words.get(timeout=START_S), words.get(timeout=SOON_S)] == [1, 2]
        time.sleep(1.0)  # by now the receiver waits for the third
        if is_killed:
            sender.kill()
        else:
            commands.put("fail")
        said = words.get(timeout=SOON_S)
        assert isinstance(said, str), said
        processes.start(_send, sender_on, messages, [TENSORS], commands, results, [end])
        assert [words.get(timeout=START_S) for _ in range(TENSORS + 1)] == [*range(1, TENSORS + 1), EXPECTED]
        return said


def lose_receiver(sender_on: str, receiver_on: str) -> str:
    """A receiver is killed at the third bucket; another one then takes everything. Returns: what the sender said."""
    words, ends = CONTEXT.Queue(), [_Ends(), _Ends()]
    messages, commands, results = CONTEXT.Queue(), CONTEXT.Queue(), CONTEXT.Queue()
    with Processes() as processes:
        receiver = processes.start(_receive, receiver_on, messages, "t2", words, ends[0])
        processes.start(_send, sender_on, messages, [TENSORS, TENSORS], commands, results, ends)
        receiver.join(timeout=START_S)
        ends[0].lost.set()
        said = results.get(timeout=SOON_S)
        words = CONTEXT.Queue()
        processes.start(_receive, receiver_on, messages, "", words, ends[1])
        sent = results.get(timeout=START_S)
        assert sent == f"sent {TENSORS} buckets", sent
        assert [words.get(timeout=SOON_S) for _ in range(TENSORS + 1)] == [*range(1, TENSORS + 1), EXPECTED]
        return said
