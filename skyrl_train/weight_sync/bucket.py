"""Named tensors packed end to end into flat byte buffers, and back.

A tensor starts at a multiple of `ALIGNMENT` bytes of its bucket and never continues in the next one. Offsets follow
from the specs alone, so specs and bytes are all that travels. Bytes between tensors are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from skyrl_train.weight_sync.control import WeightSyncError

ALIGNMENT = 1024
"""Bytes; also the row of `digest.py`, so that no row holds bytes of two tensors."""

NamedTensors = Iterable[tuple[str, Tensor]]
SpecMessage = tuple[str, str, list[int]]
"""name, dtype ("bfloat16"), shape: the JSON-like form of a TensorSpec."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor, sent ahead of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", prod(self.shape) * self.dtype.itemsize)

    def to_message(self) -> SpecMessage:
        return self.name, str(self.dtype).removeprefix("torch."), list(self.shape)

    @staticmethod
    def from_message(message: SpecMessage) -> TensorSpec:
        name, dtype_name, shape = message
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {name!r} was announced with dtype {dtype_name!r}, which torch does not have")
        return TensorSpec(name, dtype, tuple(shape))


Specs = tuple[TensorSpec, ...]
"""Tensors that travel together, known to both ends before the first byte."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors end to end."""

    specs: Specs
    data: Tensor
    """[num_bytes] uint8"""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def offsets(specs: Iterable[TensorSpec]) -> list[int]:
    """[len(specs) + 1] bytes: where each tensor starts, and the size of the bucket."""
    bounds = [0]
    for spec in specs:
        bounds.append(bounds[-1] + aligned(spec.num_bytes))
    return bounds


def num_bytes(specs: Iterable[TensorSpec]) -> int:
    return offsets(specs)[-1]


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Specs]:
    """Assign tensors, in order, to buckets of at most `bucket_bytes`; a larger tensor travels alone. Both ends call
    this with the same arguments, so the order of the specs is part of the protocol.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}: at least {ALIGNMENT} are needed")
    buckets: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        size = aligned(spec.num_bytes)
        if not buckets or used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(spec)
        used += size
    return [tuple(bucket) for bucket in buckets]


def fill(specs: Specs, tensors: Sequence[Tensor], buffer: Tensor) -> Bucket:
    """Copy tensors of these specs into a bucket, by one call: on a GPU that takes one kernel instead of hundreds (in
    which a NaN may lose its payload).
    Args: buffer [at least num_bytes(specs)] uint8; it decides the device.
    """
    bounds = offsets(specs)
    bucket = Bucket(specs, buffer[: bounds[-1]])
    ends = [(start + spec.num_bytes, end) for spec, (start, end) in zip(specs, pairwise(bounds), strict=True)]
    gaps = [buffer[last:end] for last, end in ends if last < end]
    with torch.no_grad():
        if gaps:
            torch._foreach_zero_(gaps)
        if specs:
            torch._foreach_copy_([view for _, view in unpack(bucket)], list(tensors))
    return bucket


def finish(named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Raises: WeightSyncError if there is one more tensor than was announced."""
    for name, _ in named_tensors:
        raise WeightSyncError(f"the trainer exports {name}, which is not in its specs")


def next_tensors(specs: Iterable[TensorSpec], named_tensors: Iterator[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the next tensors. Raises: WeightSyncError if one is not the one that was announced."""
    tensors = []
    for spec in specs:
        name, tensor = next(named_tensors, ("nothing more", None))
        if tensor is None or name != spec.name or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
            found = name if tensor is None else f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            announced = f"{spec.name} {spec.dtype} {spec.shape}"
            raise WeightSyncError(f"the trainer announced {announced} and then exports {found}")
        tensors.append(tensor)
    return tensors


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as views of the bucket; clone one to keep it longer than the bucket."""
    typed: dict[torch.dtype, Tensor] = {}
    for spec, start in zip(bucket.specs, offsets(bucket.specs)[:-1], strict=True):
        if spec.dtype not in typed:
            typed[spec.dtype] = bucket.data.view(spec.dtype)
        # One call instead of three for slicing and viewing: with hundreds of tensors the GPU would wait for the host.
        base = typed[spec.dtype]
        offset = base.storage_offset() + start // spec.dtype.itemsize
        yield spec.name, base.as_strided(spec.shape, _row_major(spec.shape), offset)


@functools.lru_cache(maxsize=1024)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides)) if shape else ()
