"""Rotary embedding of [T, H, D] with a cosine and a sine per token and pair of channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    heads,
    size,
    pairs,
    SIGN: tl.constexpr,
    PAIRED_IN: tl.constexpr,
    PAIRED_OUT: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    x += token * token_stride
    out += token * heads * size
    pair = tl.arange(0, PAIRS)
    cosine = tl.load(cos + token * pairs + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sine = SIGN * tl.load(sin + token * pairs + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS))[:, None]
        inside = (head < heads) & (pair < pairs)[None, :]
        source = x + head * head_stride
        target = out + head * size
        left = 2 * pair if PAIRED_IN else pair
        right = left + 1 if PAIRED_IN else left + pairs
        a = tl.load(source + left[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + right[None, :], mask=inside, other=0.0).to(tl.float32)
        left = 2 * pair if PAIRED_OUT else pair
        right = left + 1 if PAIRED_OUT else left + pairs
        tl.store(target + left[None, :], (a * cosine - b * sine).to(out.dtype.element_ty), mask=inside)
        tl.store(target + right[None, :], (b * cosine + a * sine).to(out.dtype.element_ty), mask=inside)
        if REST > 0:
            channel = 2 * pairs + tl.arange(0, REST)
            inside = (head < heads) & (channel < size)[None, :]
            tl.store(target + channel[None, :], tl.load(source + channel[None, :], mask=inside), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, paired_in: bool, paired_out: bool, inverse: bool) -> Tensor:
    """Rotate the first 2P channels of x [T, H, D] by the angles of cos and sin [T, P]; copy the others.

    Args: x: any strides; paired_in: the two channels of a pair are adjacent in x (else P apart), paired_out: in the
    result; inverse: rotate by the negative angles.
    Returns: [T, H, D] contiguous.
    """
    tokens, heads, size = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(tokens, heads, size)
    pairs = cos.shape[1]
    rest = size - 2 * pairs
    width = triton.next_power_of_2(pairs)
    if tokens:
        _rotate[(tokens,)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            heads,
            size,
            pairs,
            SIGN=-1.0 if inverse else 1.0,
            PAIRED_IN=paired_in,
            PAIRED_OUT=paired_out,
            HEADS=min(triton.next_power_of_2(heads), max(1, 2048 // width)),
            PAIRS=width,
            REST=triton.next_power_of_2(rest) if rest else 0,
        )
    return out
