"""Sums of tensors' words, added up by position; on a GPU those of many tensors by one kernel."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from skyrl_train import kernels

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HELD_BYTES = 256 << 20
"""The most bytes of copies that nobody else holds and that wait for the next kernel."""
LIVE_SHARE = 16
"""Bytes of memory that lives anyway count less by this factor: a kernel per 4 GiB, so that the last one is short."""


class WordSums:
    """[num] int64, all 0 at first."""

    def __init__(self, num: int, device: torch.device, storages: Collection[int] = ()) -> None:
        """Args: storages: addresses of those that live anyway, whose tensors may all wait for one kernel."""
        self._storages = storages
        self._sums: list[tuple[int, Tensor]] = []
        """(position, [] int64), without a GPU."""
        self._waiting: dict[int, list[tuple[int, int, int]]] = {size: [] for size in WORDS}
        """size of a word -> (address, number of words, position)"""
        self._kept: list[Tensor] = []
        """What the addresses belong to."""
        self._held = 0
        self._total = torch.zeros(num, dtype=torch.int64, device=device)

    def add(self, position: int, tensor: Tensor, word_bytes: int | None = None) -> None:
        """Add the sum of a tensor's words, modulo 2**64, at this position.
        Args: tensor: must keep its values until `total`, or its memory must be its own; word_bytes: None for elements.
        """
        size = word_bytes or tensor.element_size()
        if not tensor.is_contiguous() or tensor.storage_offset() * tensor.element_size() % size:
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not kernels.serve(tensor):
            self._sums.append((position, tensor.detach().view(-1).view(WORDS[size]).sum()))
            return
        num_bytes = tensor.nbytes
        assert num_bytes % size == 0, f"{num_bytes} bytes are no whole number of words of {size}"
        self._waiting[size].append((tensor.data_ptr(), num_bytes // size, position))
        self._kept.append(tensor)
        is_live = tensor.untyped_storage().data_ptr() in self._storages
        self._held += num_bytes // LIVE_SHARE if is_live else num_bytes
        if self._held > HELD_BYTES:
            self._launch()

    def _launch(self) -> None:
        for size, waiting in self._waiting.items():
            if waiting:
                from skyrl_train.kernels import word_sums  # triton is installed with GPUs only

                word_sums.add(self._total, waiting, size)
                waiting.clear()
        self._kept.clear()  # in the order of the stream: whoever gets the memory next writes to it after the kernels
        self._held = 0

    def total(self) -> Tensor:
        """[num] int64"""
        self._launch()
        if self._sums:
            positions, sums = zip(*self._sums, strict=True)
            self._total.index_add_(0, torch.tensor(positions, device=self._total.device), torch.stack(sums))
            self._sums.clear()
        return self._total
