"""SwiGLU, silu(gate) * up of rows [gate | up], with an optional weight per row (the router's probability)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu_forward(x, weights, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * 2 * width
    out += row * width
    scale = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up * scale
        tl.store(out + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, x, weights, grad_x, grad_weights, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * 2 * width
    grad_x += row * 2 * width
    grad += row * width
    scale = tl.load(weights + row).to(tl.float32) if WEIGHTED else 1.0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            total += g * silu * up
            g *= scale
        grad_gate = g * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(grad_x + column, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_x + width + column, (g * silu).to(grad_x.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(total, 0).to(grad_weights.dtype.element_ty))


def _block(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def forward(x: Tensor, weights: Tensor | None) -> Tensor:
    """x [N, 2F] contiguous, weights [N] or None -> [N, F] in x's dtype."""
    num, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num, width)
    if num:
        _swiglu_forward[(num,)](x, x if weights is None else weights, out, width, weights is not None, _block(width))
    return out


def backward(grad: Tensor, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of x [N, 2F] and of the weights [N] for grad [N, F]; all contiguous."""
    num, width = grad.shape
    grad_x = torch.empty_like(x)
    grad_weights = None if weights is None else torch.empty_like(weights)
    if num:
        _swiglu_backward[(num,)](
            grad,
            x,
            x if weights is None else weights,
            grad_x,
            x if grad_weights is None else grad_weights,
            width,
            weights is not None,
            _block(width),
        )
    return grad_x, grad_weights
