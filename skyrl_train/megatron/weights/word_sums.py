"""Sums of tensors' words, added up by position; on a GPU those of many tensors by one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_train import kernels

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HELD_BYTES = 256 << 20
"""The most bytes that wait for the next kernel: nobody else may hold them, and the last kernel is short."""


@dataclass(slots=True)
class _Waiting:
    """What the next kernel sums."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """(address, number of words, position)"""
    tensors: list[Tensor] = field(default_factory=list)
    """Those at the addresses."""
    num_bytes: int = 0


class WordSums:
    """[num] int64, all 0 at first."""

    def __init__(self, num: int, device: torch.device) -> None:
        self._sums: list[tuple[int, Tensor]] = []
        """(position, [] int64), without a GPU."""
        self._waiting = {size: _Waiting() for size in WORDS}
        """By the size of a word: a kernel for each."""
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
        waiting = self._waiting[size]
        waiting.rows.append((tensor.data_ptr(), num_bytes // size, position))
        waiting.tensors.append(tensor)
        waiting.num_bytes += num_bytes
        if waiting.num_bytes > HELD_BYTES:
            self._launch(size)

    def _launch(self, size: int) -> None:
        from skyrl_train.kernels import word_sums  # triton is installed with GPUs only

        word_sums.add(self._total, self._waiting[size].rows, size)
        # In the order of the stream: whoever gets the tensors' memory next writes to it after the kernel.
        self._waiting[size] = _Waiting()

    def total(self) -> Tensor:
        """[num] int64"""
        for size, waiting in self._waiting.items():
            if waiting.rows:
                self._launch(size)
        if self._sums:
            positions, sums = zip(*self._sums, strict=True)
            self._total.index_add_(0, torch.tensor(positions, device=self._total.device), torch.stack(sums))
            self._sums.clear()
        return self._total
