"""Sums of the expert outputs of each token, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sums(x, order, starts, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    end = tl.load(starts + row + 1)
    for index in range(tl.load(starts + row), end):
        source = tl.load(order + index).to(tl.int64)
        total += tl.load(x + source * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def sums(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """out[t] = sum of x[order[j]] for starts[t] <= j < starts[t + 1].
    Args: x [M, H] contiguous; order [M] and starts [T + 1], integers.
    Returns: [T, H] in x's dtype, added in float32 in the order given.
    """
    num, width = len(starts) - 1, x.shape[1]
    out = x.new_empty(num, width)
    if num:
        block = min(1024, triton.next_power_of_2(width))
        _sums[(num, triton.cdiv(width, block))](x, order, starts, out, width, block)
    return out
