"""Report of a send: bytes, digests and the time of each part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from skyrl_train.weight_sync.bucket import Bucket, TensorSpec
from skyrl_train.weight_sync.digest import digests, row_hashes


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

    @property
    def fingerprint(self) -> int:
        """64 bits that two reports share if they sent the same."""
        text = json.dumps(self.digests, sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def short(self) -> SendReport:
        """The report with its fingerprint in place of thousands of digests, under an empty name."""
        return replace(self, digests={"": self.fingerprint})


class SendClock:
    """Collects a SendReport while the buckets go out."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts = {"plan_s": 0.0, "convert_s": 0.0, "digest_s": 0.0, "wait_s": 0.0}
        self.num_bytes = self.num_buckets = 0
        self._specs: list[TensorSpec] = []
        self._hashes: list[Tensor] = []
        self._digests: dict[str, int] = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._parts[part] += time.perf_counter() - before

    def count(self, specs: Sequence[TensorSpec]) -> None:
        """Count a bucket of these tensors as sent."""
        self.num_bytes += sum(spec.num_bytes for spec in specs)
        self.num_buckets += 1

    def digest(self, bucket: Bucket) -> None:
        with self.timed("digest_s"):
            self._specs += bucket.specs
            self._hashes.append(row_hashes(bucket.data))

    def end_digests(self) -> None:
        """Compute the digests of all buckets. Waits for the device."""
        with self.timed("digest_s"):
            self._digests = digests(self._specs, self._hashes)

    def report(self) -> SendReport:
        seconds = time.perf_counter() - self._started
        return SendReport(
            num_bytes=self.num_bytes,
            num_buckets=self.num_buckets,
            seconds=seconds,
            pack_s=seconds - sum(self._parts.values()),
            digests=self._digests,
            **self._parts,
        )
