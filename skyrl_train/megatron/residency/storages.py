"""Storages that are emptied and filled again; many small ones become one on the way.

A view of a storage that was emptied and filled again is a view of the same values, so nobody who holds views needs to
know. What is an allocation, a copy and a free for each storage costs time, though: the optimizer of a model of 0.6
billion parameters, with three small tensors per parameter, came back at 21 GB/s where a bus carries 55.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from skyrl_train.device import device_type

ALIGNMENT = 128
"""Bytes; where tensors share memory each starts at a multiple of it, which suits every kernel's loads."""


class Piece:
    """One storage that leaves and comes back as a whole."""

    def __init__(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        self._storage = tensor.untyped_storage()
        self._device = tensor.device
        self.num_bytes = self._storage.nbytes()
        self.is_kept, self.is_frozen = is_kept, is_frozen
        """Whether its contents come back; whether they never change."""
        assert self._storage.resizable(), f"a storage of {self.num_bytes} bytes cannot be emptied: another owns it"

    @property
    def key(self) -> int | None:
        """Of the storage that it is now; None while it is many."""
        return self._storage._cdata

    def runs(self) -> list[tuple[int, Tensor]]:
        """What is on the device: (offset in the piece, bytes)."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        return [(0, whole.set_(self._storage))]  # type: ignore[call-overload]

    def empty(self) -> None:
        self._storage.resize_(0)

    def come_back(self) -> None:
        """The memory; its contents are anything."""
        self._storage.resize_(self.num_bytes)


class Gathered(Piece):
    """Tensors that own a storage each, and come back as views of one.

    That one is made when they come back: before, there would be two copies on the device.
    """

    def __init__(self, tensors: Sequence[Tensor], *, is_frozen: bool) -> None:
        self._tensors = tensors
        self._device = tensors[0].device
        ends = list(accumulate(padded(tensor.nbytes) for tensor in tensors))
        self._offsets = [0, *ends[:-1]]
        self.num_bytes = ends[-1]
        self.is_kept, self.is_frozen = True, is_frozen
        self._flat: Tensor | None = None

    @property
    def key(self) -> int | None:
        return None if self._flat is None else self._flat.untyped_storage()._cdata

    def runs(self) -> list[tuple[int, Tensor]]:
        if self._flat is not None:
            return [(0, self._flat)]
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in self._tensors]
        return list(zip(self._offsets, flat, strict=True))

    def empty(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def come_back(self) -> None:
        self._flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            mine = self._flat[offset : offset + tensor.nbytes]
            tensor.data = mine.view(tensor.dtype).view(tensor.shape)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def pieces_of(
    tensors: Iterable[Tensor],
    seen: set[int],
    *,
    is_kept: bool = True,
    is_frozen: bool = False,
    may_gather: bool = False,
) -> list[Piece]:
    """The storages of the tensors on the device that are not in `seen`, to which they are added.

    Args: may_gather: the tensors stay the same objects, never replaced, so they are worth gathering.
    """
    single: list[Tensor] = []
    alone: list[Tensor] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and tensor.device.type == device_type():
            seen.add(storage._cdata)
            (alone if may_gather and _is_alone(tensor) else single).append(tensor)
    if len(alone) == 1:
        single.append(alone.pop())
    pieces = [Piece(tensor, is_kept=is_kept, is_frozen=is_frozen) for tensor in single]
    return [Gathered(alone, is_frozen=is_frozen), *pieces] if alone else pieces


def _is_alone(tensor: Tensor) -> bool:
    """Whether it is all of its storage, and no other tensor would go on with the old one if this got another."""
    storage = tensor.untyped_storage()
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_contiguous()
        and tensor.nbytes == storage.nbytes()
        and _num_holders(tensor) == _holders_of_one()
    )


def _num_holders(tensor: Tensor) -> int:
    """Tensors with this storage, whoever holds them, and Python's handle of the storage."""
    return torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _holders_of_one() -> int:
    return _num_holders(torch.empty(1))
