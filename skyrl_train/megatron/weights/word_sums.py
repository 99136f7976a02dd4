"""Sums of tensors' words, added up by position; on a GPU those of many tensors by one kernel."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from skyrl_train import kernels

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HELD_BYTES = 256 << 20
"""The most bytes of copies that nobody else holds and that wait for the next kernel."""


class WordSums:
    """[num] int64, all 0 at first."""

    def __init__(self, num: int, device: torch.device, storages: Collection[int] = ()) -> None:
        """Args: storages: addresses of those that live anyway, whose tensors may all wait for one kernel."""
        self._storages = storages
        self._sums: list[tuple[int, Tensor]] = []
        """(position, [] int64), without a GPU."""
        self._waiting: dict[int, list[tuple[int, Tensor]]] = {size: [] for size in WORDS}
        """size of a word -> (position, words)"""
        self._held = 0
        self._total = torch.zeros(num, dtype=torch.int64, device=device)

    def add(self, position: int, tensor: Tensor, word_bytes: int | None = None) -> None:
        """Add the sum of a tensor's words, modulo 2**64, at this position.
        Args: tensor: must keep its values until `total`, or its memory must be its own; word_bytes: None for elements.
        """
        flat = tensor.detach().contiguous().view(-1)
        size = word_bytes or flat.element_size()
        if flat.storage_offset() * flat.element_size() % size:
            flat = flat.clone()
        words = flat.view(WORDS[size])
        if not kernels.serve(words):
            self._sums.append((position, words.sum()))
            return
        self._waiting[size].append((position, words))
        if words.untyped_storage().data_ptr() not in self._storages:
            self._held += words.numel() * size
        if self._held > HELD_BYTES:
            self._launch()

    def _launch(self) -> None:
        for waiting in self._waiting.values():
            if waiting:
                from skyrl_train.kernels import word_sums  # triton is installed with GPUs only

                word_sums.add(self._total, *zip(*waiting, strict=True))
                waiting.clear()
        self._held = 0

    def total(self) -> Tensor:
        """[num] int64"""
        self._launch()
        if self._sums:
            positions, sums = zip(*self._sums, strict=True)
            self._total.index_add_(0, torch.tensor(positions, device=self._total.device), torch.stack(sums))
            self._sums.clear()
        return self._total
