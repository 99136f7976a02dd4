"""Sending weights in tests: what a trainer knows of its tensors, and both ends of a channel in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from skyrl_train.weight_sync.bucket import ALIGNMENT, Bucket, TensorSpec, fill, next_tensors, num_bytes, plan_buckets
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.digest import digests, row_hashes
from skyrl_train.weight_sync.transport import Load, Receiver

Named = Sequence[tuple[str, torch.Tensor]]


def specs_of(named_tensors: Named) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]


def pack(named_tensors: Named, bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets as a sender makes them, each in a buffer of its own that was full of ones."""
    tensors = iter(named_tensors)
    for plan in plan_buckets(specs_of(named_tensors), bucket_bytes):
        yield fill(plan, next_tensors(plan, tensors), torch.full((num_bytes(plan),), 255, dtype=torch.uint8))


def bucket_digests(bucket: Bucket) -> dict[str, int]:
    return digests(bucket.specs, [row_hashes(bucket.data)])


def tensor_digest(tensor: torch.Tensor) -> int:
    """The digest of one tensor outside any bucket."""
    (bucket,) = pack([("", tensor)], ALIGNMENT)
    return bucket_digests(bucket)[""]


class InThread:
    """A call that runs in a thread, as a sender waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the receiver hangs"
        self.check()


class ReceivingEnd:
    """A receiver in this process; `post` is what its sender is given."""

    def __init__(self, load: Load) -> None:
        self.receiver: Receiver | None = None
        self.digests: dict[str, int] = {}
        self.messages: list[ControlMessage] = []
        self.received: InThread | None = None
        self._load = load
        self._one_at_a_time = threading.Lock()

    def post(self, message: ControlMessage) -> InThread:
        self.messages.append(message)

        def receive() -> None:
            assert self.receiver is not None
            with self._one_at_a_time:  # as an engine works off its messages
                self.digests = self.receiver.receive(message, self._load)

        self.received = InThread(receive)
        return self.received
