"""RMSNorm over the last axis. Short rows (the norms of queries and keys) share a program."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 4
"""Programs of the backward pass per multiprocessor; each keeps one partial gradient of the weight."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm_forward(x, weight, out, scale, num_rows, x_stride, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(scale + row, inverse, mask=row < num_rows)
    y = values * inverse[:, None] * w[None, :]
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _norm_backward(
    grad,
    x,
    weight,
    scale,
    grad_x,
    grad_weight,
    num_rows,
    x_stride,
    width,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        inverse = tl.load(scale + row, mask=row < num_rows, other=0.0)
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        normed = values * inverse[:, None]
        g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        total += g * normed
        g = g * w[None, :]
        mean = tl.sum(g * normed, 1) / width
        dx = inverse[:, None] * (g - normed * mean[:, None])
        tl.store(grad_x + offset, dx.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


def _shape(width: int) -> tuple[int, int, int]:
    """(rows per program, columns of its tile, warps)"""
    block = triton.next_power_of_2(width)
    return max(1, 4096 // block), block, min(16, max(4, block // 512))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [N, D] with contiguous rows, weight [D] -> x / rms(x) * weight; and 1 / rms(x) [N] float32."""
    num, width = x.shape
    out, scale = x.new_empty(num, width), x.new_empty(num, dtype=torch.float32)
    if num:
        rows, block, warps = _shape(width)
        _norm_forward[(triton.cdiv(num, rows),)](
            x, weight, out, scale, num, x.stride(0), width, eps, rows, block, num_warps=warps
        )
    return out, scale


def backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, D] and of the weight [D] for grad [N, D], which is contiguous."""
    num, width = x.shape
    grad_x = x.new_empty(num, width)
    if not num:
        return grad_x, torch.zeros_like(weight)
    rows, block, warps = _shape(width)
    tiles = triton.cdiv(num, rows)
    programs = min(tiles, PROGRAMS_PER_PROCESSOR * _num_processors(x.device))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad, x, weight, scale, grad_x, parts, num, x.stride(0), width, tiles, rows, block, num_warps=warps
    )
    return grad_x, parts.sum(0).to(weight.dtype)
