"""Softmax statistics of rows of logits in one pass, and the gradient of logprob and entropy in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _logprob_statistics(
    logits, labels, peak, total, product, target, row_stride, width, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.arange(0, BLOCK)
    # one running maximum, sum and product per lane, joined at the end
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(top, x)
        known = higher > float("-inf")
        shift = tl.where(known, higher, 0.0)
        faded = tl.exp(top - shift)
        fresh = tl.exp(x - shift)
        if ENTROPY:
            # sum of (x - shift) exp(x - shift); an infinite x has no part in it
            fall = tl.where(top > float("-inf"), (top - shift) * sums, 0.0)
            rise = tl.where(x > float("-inf"), (x - shift) * fresh, 0.0)
            products = (products + fall) * faded + rise
        sums = sums * faded + fresh
        top = higher
    highest = tl.max(top, 0)
    known = top > float("-inf")
    faded = tl.where(known, tl.exp(top - highest), 0.0)
    tl.store(peak + row, highest)
    tl.store(total + row, tl.sum(sums * faded, 0))
    if ENTROPY:
        shifted = tl.where(known, (products + (top - highest) * sums) * faded, 0.0)
        tl.store(product + row, tl.sum(shifted, 0))
    label = tl.load(labels + row)
    here = (label >= 0) & (label < width)
    chosen = tl.load(logits + label, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(target + row, tl.where(here, chosen - highest, 0.0))


@triton.jit
def _logprob_gradient(
    logits,
    labels,
    log_z,
    entropy,
    grad_logprobs,
    grad_entropy,
    out,
    row_stride,
    width,
    shard,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
    log_p = x - tl.load(log_z + row)
    p = tl.exp(log_p)
    up = tl.load(grad_logprobs + row)
    grad = -p * up
    if ENTROPY:
        # dH/dx = -p (log p + H)
        excess = log_p + tl.load(entropy + row)
        grad -= tl.where(p > 0.0, p * excess * tl.load(grad_entropy + row), 0.0)
    grad += tl.where(column == tl.load(labels + row), up, 0.0)
    grad = tl.where(inside, grad * scale, 0.0)
    tl.store(out + row * shard + column, grad.to(out.dtype.element_ty), mask=column < shard)


def statistics(
    logits: Tensor, labels: Tensor, width: int, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x = logits[:, :width] / temperature, each [N] float32: the maximum m, sum(exp(x - m)), sum((x - m) exp(x - m))
    (0 unless with_entropy), and x - m at the label (0 where the label is outside 0 .. width - 1).

    Args: logits [N, V], rows contiguous; labels [N] int64.
    """
    num = len(logits)
    peak, total, product, target = logits.new_zeros(4, num, dtype=torch.float32).unbind()
    if num:
        _logprob_statistics[(num,)](
            logits,
            labels,
            peak,
            total,
            product,
            target,
            logits.stride(0),
            width,
            1.0 / temperature,
            with_entropy,
            BLOCK,
            num_warps=8,
        )
    return peak, total, product, target


def gradient(
    logits: Tensor,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    width: int,
    temperature: float,
    *,
    with_entropy: bool,
) -> Tensor:
    """Gradient of the logits [N, V] (0 from column `width` on) for those of logprobs and entropy [N] float32.

    Args: log_z [N]: log of sum(exp(x)) over the whole vocabulary; labels [N]: outside 0 .. width - 1 where another rank
    holds the label.
    """
    num, shard = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if num:
        _logprob_gradient[(num, triton.cdiv(shard, BLOCK))](
            logits,
            labels,
            log_z,
            entropy,
            grad_logprobs,
            grad_entropy,
            out,
            logits.stride(0),
            width,
            shard,
            1.0 / temperature,
            with_entropy,
            BLOCK,
            num_warps=8,
        )
    return out
