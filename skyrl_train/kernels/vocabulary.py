"""Online softmax over rows of logits in one pass (arXiv:1805.02867), and the gradient of logprob and entropy."""

# ruff: noqa: E741  l is the paper's name of the sum
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _logprob_statistics(
    logits, labels, m_out, l_out, s_out, target, row_stride, width, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Running maximum m, l = sum(exp(x - m)) and s = sum((x - m) exp(x - m)) of each lane, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        m_new = tl.maximum(m, x)
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)
        rescale = tl.exp(m - shift)
        p = tl.exp(x - shift)
        if ENTROPY:
            # infinite x and m add nothing
            correction = tl.where(m > float("-inf"), (m - shift) * l, 0.0)
            s = (s + correction) * rescale + tl.where(x > float("-inf"), (x - shift) * p, 0.0)
        l = l * rescale + p
        m = m_new
    m_row = tl.max(m, 0)
    known = m > float("-inf")
    rescale = tl.where(known, tl.exp(m - m_row), 0.0)
    tl.store(m_out + row, m_row)
    tl.store(l_out + row, tl.sum(l * rescale, 0))
    if ENTROPY:
        tl.store(s_out + row, tl.sum(tl.where(known, (s + (m - m_row) * l) * rescale, 0.0), 0))
    label = tl.load(labels + row)
    here = (label >= 0) & (label < width)
    chosen = tl.load(logits + label, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(target + row, tl.where(here, chosen - m_row, 0.0))


@triton.jit
def _logprob_gradient(
    logits,
    labels,
    log_z,
    entropy,
    grad_logprobs,
    grad_entropy,
    width,
    shard,
    scale,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = logits + row * shard + column
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32) * scale
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
    tl.store(place, grad.to(logits.dtype.element_ty), mask=column < shard)


def statistics(
    logits: Tensor, labels: Tensor, width: int, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return statistics of x = logits[:, :width] / temperature, each [N] float32.

    The maximum m, l = sum(exp(x - m)), s = sum((x - m) exp(x - m)) (0 unless with_entropy), and x - m at the label (0
    if the label is outside 0 .. width - 1).

    Args: logits [N, V], rows contiguous; labels [N] int64.
    """
    num = len(logits)
    m, l, s, target = logits.new_zeros(4, num, dtype=torch.float32).unbind()
    if num:
        stride, scale = logits.stride(0), 1.0 / temperature
        _logprob_statistics[(num,)](
            logits, labels, m, l, s, target, stride, width, scale, with_entropy, BLOCK, num_warps=8
        )
    return m, l, s, target


def replace_by_gradient(
    logits: Tensor,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    width: int,
    temperature: float,
) -> None:
    """Overwrite contiguous logits [N, V] by their gradient, 0 from column `width` on.

    Args: log_z [N]: log of sum(exp(x)) over the whole vocabulary; labels [N]: outside 0 .. width - 1 if another rank
    holds the label; grad_logprobs, grad_entropy [N] float32, the second None if nothing depends on the entropy.
    """
    num, shard = logits.shape
    assert logits.is_contiguous()
    if num:
        # Each program reads only the elements that it writes.
        grads = grad_logprobs, grad_logprobs if grad_entropy is None else grad_entropy
        _logprob_gradient[(num, triton.cdiv(shard, BLOCK))](
            logits,
            labels,
            log_z,
            entropy,
            *grads,
            width,
            shard,
            1.0 / temperature,
            grad_entropy is not None,
            BLOCK,
            num_warps=8,
        )
