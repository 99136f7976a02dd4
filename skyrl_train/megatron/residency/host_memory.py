"""Pinned host memory in which storages wait for their next turn on the device."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from skyrl_train.device import CopyStream, device_type
from skyrl_train.megatron.residency.storages import Piece, padded

THREADS = 8
"""That have the system find pages. Pinning finds those that are missing too, but one after the other."""


class HostMemory:
    """A place for each piece, made when it leaves for the first time and used at every turn."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}
        """By the key of a storage."""
        self._away: dict[Piece, Tensor] = {}
        """Places of the pieces that were taken."""
        self._current: set[int] = set()
        """Keys of frozen storages whose place holds what they hold."""
        self._copies = CopyStream()
        self._registered: list[int] = []
        weakref.finalize(self, _unregister, self._registered)

    def take(self, pieces: Sequence[Piece]) -> int:
        """Let the pieces be copied from the device; returns the bytes. Empty none before the device has done it."""
        self._make_room(pieces)
        moving = [piece for piece in pieces if not (piece.is_frozen and piece.key in self._current)]
        with self._copies.copying():
            for piece in moving:
                for offset, run in piece.runs():
                    self._away[piece][offset : offset + len(run)].copy_(run, non_blocking=True)
        return sum(piece.num_bytes for piece in moving)

    def give(self, pieces: Sequence[Piece]) -> int:
        """Let the pieces come back with what was taken; returns the bytes. The copies are under way until `settle`.

        While one is copied, memory is asked for the next.
        """
        for piece in pieces:
            piece.come_back()
            place = self._away[piece]
            ((_, whole),) = piece.runs()
            with self._copies.copying():
                whole.copy_(place, non_blocking=True)
            assert piece.key is not None
            self._places[piece.key] = place
            if piece.is_frozen:
                self._current.add(piece.key)
        for piece in pieces:
            del self._away[piece]
        return sum(piece.num_bytes for piece in pieces)

    def settle(self) -> None:
        """What the device is asked from now on finds what was given."""
        self._copies.settle()

    def forget_frozen(self) -> None:
        self._current.clear()

    def _make_room(self, pieces: Sequence[Piece]) -> None:
        missing = []
        for piece in pieces:
            place = None if piece.key is None else self._places.get(piece.key)
            if place is None or len(place) != piece.num_bytes:
                missing.append(piece)
            else:
                self._away[piece] = place
        if missing:
            sizes = [padded(piece.num_bytes) for piece in missing]
            places = self._pinned(sum(sizes)).split(sizes)
            self._away |= {piece: place[: piece.num_bytes] for piece, place in zip(missing, places, strict=True)}

    def _pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8. torch's own pinned memory would be rounded up to a power of two."""
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        arena = torch.frombuffer(region, dtype=torch.uint8)
        with ThreadPoolExecutor(THREADS) as pool:
            # A byte of each page.
            list(pool.map(Tensor.zero_, arena[:: mmap.PAGESIZE].chunk(THREADS)))
        if device_type() == "cuda":
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostRegister(arena.data_ptr(), num_bytes, 0)
            if int(error) != 0:
                raise MemoryError(
                    f"{num_bytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}): the "
                    "machine has too little free, or `ulimit -l` forbids it; with trainer.placement.release=none "
                    "nothing is offloaded"
                )
            self._registered.append(arena.data_ptr())
        return arena


def _unregister(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]
