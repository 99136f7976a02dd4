"""Row hashes of the digest in one pass over the bytes on a GPU (defined in weight_sync/digest.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_rows"])
def _row_hashes(words, weights, hashes, num_rows, ROWS: tl.constexpr, WORDS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WORDS)
    weight = tl.load(weights + columns)
    word = tl.load(words + rows[:, None] * WORDS + columns[None, :], mask=(rows < num_rows)[:, None], other=0)
    hashed = tl.sum((word ^ (word >> 29)) * weight[None, :], axis=1)
    tl.store(hashes + rows, hashed, mask=rows < num_rows)


def row_hashes(words: Tensor, weights: Tensor) -> Tensor:
    """[R, W] int64 on a GPU, [W] int64 -> [R] int64: sum of (x ^ (x >> 29)) * weight over each row, modulo 2**64."""
    hashes = torch.empty(len(words), dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(len(words), ROWS_PER_PROGRAM),)
    if len(words):
        _row_hashes[grid](words, weights, hashes, len(words), ROWS=ROWS_PER_PROGRAM, WORDS=words.shape[1])
    return hashes
