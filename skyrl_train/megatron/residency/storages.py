"""Storages whose device memory is freed and allocated again; many small ones are merged into one on the way.

A view of a storage stays valid across `resize_`, so other holders of views need not know. But an allocation, a copy and
a free per storage cost time: the optimizer of a model of 0.6 billion parameters, with three small tensors per
parameter, was reloaded at 21 GB/s where the bus carries 55.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from skyrl_train.device import device_type

ALIGNMENT = 128
"""Bytes; tensors that share memory start at multiples of it, which suits every kernel's loads."""


class StorageBlock:
    """One storage that is freed and allocated as a unit."""

    def __init__(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        """Args: is_kept: the contents are restored; is_frozen: they never change."""
        self._storage = tensor.untyped_storage()
        self._device = tensor.device
        self.num_bytes = self._storage.nbytes()
        self.is_kept, self.is_frozen = is_kept, is_frozen
        assert self._storage.resizable(), f"a storage of {self.num_bytes} bytes cannot be resized: it is not torch's"

    @property
    def key(self) -> int | None:
        """Key of the current storage; None while the block is several storages."""
        return self._storage._cdata

    def parts(self) -> list[tuple[int, Tensor]]:
        """(offset in the block, bytes [n] uint8) of the memory on the device."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        return [(0, whole.set_(self._storage))]  # type: ignore[call-overload]

    def free(self) -> None:
        self._storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory; its contents are undefined."""
        self._storage.resize_(self.num_bytes)


class MergedBlock(StorageBlock):
    """Tensors that each own a storage at first, and become views of one when it is allocated. The merge does not happen
    earlier: there would be two copies on the device.
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

    def parts(self) -> list[tuple[int, Tensor]]:
        if self._flat is not None:
            return [(0, self._flat)]
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in self._tensors]
        return list(zip(self._offsets, flat, strict=True))

    def free(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        self._flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            mine = self._flat[offset : offset + tensor.nbytes]
            tensor.data = mine.view(tensor.dtype).view(tensor.shape)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storage_blocks(
    tensors: Iterable[Tensor], seen: set[int], *, is_kept: bool = True, is_frozen: bool = False, may_merge: bool = False
) -> list[StorageBlock]:
    """Return blocks of the tensors' storages on the device that are not in `seen`, and add these to it.
    Args: may_merge: the tensors stay the same objects, never replaced, so merging them is worth it.
    """
    single: list[Tensor] = []
    merged: list[Tensor] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and tensor.device.type == device_type():
            seen.add(storage._cdata)
            (merged if may_merge and _owns_storage(tensor) else single).append(tensor)
    if len(merged) == 1:
        single.append(merged.pop())
    blocks = [StorageBlock(tensor, is_kept=is_kept, is_frozen=is_frozen) for tensor in single]
    return [MergedBlock(merged, is_frozen=is_frozen), *blocks] if merged else blocks


def _owns_storage(tensor: Tensor) -> bool:
    """Whether the tensor fills its storage alone, so that no other tensor would keep the old one if it got another."""
    storage = tensor.untyped_storage()
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_contiguous()
        and tensor.nbytes == storage.nbytes()
        and _use_count(tensor) == _use_count_of_owner()
    )


def _use_count(tensor: Tensor) -> int:
    """Number of tensors with this storage, and Python's handle of the storage."""
    return torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _use_count_of_owner() -> int:
    return _use_count(torch.empty(1))
