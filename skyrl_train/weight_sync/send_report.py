"""What was sent and how long its parts took, and the clock that collects it while the buckets go out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from skyrl_train.weight_sync.bucket import Bucket, NamedTensors, TensorSpec
from skyrl_train.weight_sync.digest import digests, row_hashes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SendReport:
    """One finished send. The parts of `seconds` overlap with the receivers' work, not with each other."""

    num_bytes: int
    num_buckets: int
    seconds: float
    plan_s: float
    """Assigning tensors to buckets and posting the plan to the receivers."""
    convert_s: float
    """Waiting for the source of the tensors."""
    pack_s: float
    digest_s: float
    wait_s: float
    """Waiting for the receivers."""
    digests: dict[str, int]
    """name -> digest of the sent bytes."""


@dataclass(slots=True)
class SendClock:
    """Collects a SendReport while the buckets go out."""

    started: float = field(default_factory=time.perf_counter)
    plan_s: float = 0.0
    convert_s: float = 0.0
    digest_s: float = 0.0
    wait_s: float = 0.0
    num_bytes: int = 0
    num_buckets: int = 0
    _specs: list[TensorSpec] = field(default_factory=list)
    _hashes: list[Tensor] = field(default_factory=list)

    def source(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors and count the time that making them takes."""
        iterator = iter(named_tensors)
        while True:
            before = time.perf_counter()
            item = next(iterator, None)
            self.convert_s += time.perf_counter() - before
            if item is None:
                return
            yield item

    def wait(self, until: Callable[..., T], *args: object) -> T:
        before = time.perf_counter()
        result = until(*args)
        self.wait_s += time.perf_counter() - before
        return result

    def digest(self, bucket: Bucket) -> None:
        before = time.perf_counter()
        self._specs += bucket.specs
        self._hashes.append(row_hashes(bucket.data))
        self.num_bytes += sum(spec.num_bytes for spec in bucket.specs)
        self.num_buckets += 1
        self.digest_s += time.perf_counter() - before

    def report(self) -> SendReport:
        before = time.perf_counter()
        found = digests(self._specs, torch.cat(self._hashes)) if self._hashes else {}
        self.digest_s += time.perf_counter() - before
        seconds = time.perf_counter() - self.started
        return SendReport(
            num_bytes=self.num_bytes,
            num_buckets=self.num_buckets,
            seconds=seconds,
            plan_s=self.plan_s,
            convert_s=self.convert_s,
            pack_s=seconds - self.plan_s - self.convert_s - self.digest_s - self.wait_s,
            digest_s=self.digest_s,
            wait_s=self.wait_s,
            digests=found,
        )
