"""Named tensors packed end to end into flat byte buffers, and back.

A tensor starts at a multiple of `ALIGNMENT` bytes of its bucket and never continues in the next one. Offsets follow
from the specs alone, so specs and bytes are all that travels. Bytes between tensors are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 1024
"""Bytes; also the row of `digest.py`, so that no row holds bytes of two tensors."""

SpecMessage = tuple[str, str, list[int]]
"""name, dtype ("bfloat16"), shape: the JSON-like form of a TensorSpec."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver must know of a tensor before its bytes arrive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def to_message(self) -> SpecMessage:
        return self.name, str(self.dtype).removeprefix("torch."), list(self.shape)

    @staticmethod
    def from_message(message: SpecMessage) -> TensorSpec:
        name, dtype_name, shape = message
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {name!r} was announced with dtype {dtype_name!r}, which torch does not have")
        return TensorSpec(name, dtype, tuple(shape))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors, end to end."""

    specs: tuple[TensorSpec, ...]
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


def new_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def pack(
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    allocate: Callable[[int], Tensor] = new_buffer,
) -> Iterator[Bucket]:
    """Copy tensors, in their order, into buckets of at most `bucket_bytes`.

    A tensor is copied before the next one is asked for, so the source may overwrite it then. A tensor larger than a
    bucket travels alone in one of its own size.

    Args: allocate gives a uint8 buffer of at least that many bytes; it may hand out an old buffer again as soon as
        the bucket in it is no longer needed, and it decides the device.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; at least {ALIGNMENT} are needed")
    buffer: Tensor | None = None
    specs: list[TensorSpec] = []
    used = 0
    for name, tensor in named_tensors:
        spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        size = aligned(spec.num_bytes)
        if buffer is not None and used + size > bucket_bytes:
            yield Bucket(tuple(specs), buffer[:used])
            buffer = None
        if buffer is None:
            buffer, specs, used = allocate(max(size, bucket_bytes)), [], 0
        _copy_into(buffer[used : used + size], tensor, spec)
        specs.append(spec)
        used += size
    if buffer is not None:
        yield Bucket(tuple(specs), buffer[:used])


def _copy_into(room: Tensor, tensor: Tensor, spec: TensorSpec) -> None:
    room[: spec.num_bytes].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    if len(room) > spec.num_bytes:
        room[spec.num_bytes :].zero_()


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors as views of the bucket: whoever keeps one beyond the bucket's life clones it."""
    for spec, start in zip(bucket.specs, offsets(bucket.specs), strict=False):
        yield spec.name, bucket.data[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
