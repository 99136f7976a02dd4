"""Sums of the words of many tensors by one kernel: a sum by torch per tensor costs more on the host than on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
PROGRAMS = 128
"""Per tensor: enough for all of a GPU's processors, few for the hundreds of tensors that are short."""


@triton.jit(do_not_specialize=["num"])
def _word_sums(table, num, sums, WORD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    tensor, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words = tl.load(table + tensor).to(tl.pointer_type(WORD))
    size = tl.load(table + num + tensor)
    if part * BLOCK < size:
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(part * BLOCK, size, PROGRAMS * BLOCK):
            index = start + tl.arange(0, BLOCK)
            total += tl.load(words + index, mask=index < size, other=0).to(tl.int64)
        tl.atomic_add(sums + tl.load(table + 2 * num + tensor), tl.sum(total, axis=0))


def add(sums: Tensor, tensors: Sequence[tuple[int, int, int]], word_bytes: int) -> None:
    """sums[position] += the sum of the words at an address, as signed integers modulo 2**64, for each tensor. Does not
    wait for the GPU.

    Args: sums [N] int64; tensors: (address, number of words, position) of contiguous memory, which must not be written
        to or freed on another stream before the kernel has run.
    """
    table = torch.tensor(list(zip(*tensors, strict=True)), dtype=torch.int64)
    if sums.is_cuda:
        table = table.pin_memory().to(sums.device, non_blocking=True)
    word = {2: tl.int16, 4: tl.int32, 8: tl.int64}[word_bytes]
    grid = (len(tensors), PROGRAMS)
    _word_sums[grid](table, len(tensors), sums, WORD=word, PROGRAMS=PROGRAMS, BLOCK=BLOCK)
