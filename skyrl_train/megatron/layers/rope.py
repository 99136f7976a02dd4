"""Rotary embedding of packed samples without a loop over them and without waiting for the device.

Megatron's unfused version reads the sample bounds on the host and, in 0.19, rotates sample by sample: most of the 100
ms that a micro-batch of 64 short samples took on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from skyrl_train import kernels


def packed_positions(cu_seqlens: Tensor, num_local: int, cp_rank: int, cp_size: int) -> Tensor:
    """Position within its sample of each token that a context-parallel rank holds, [num_local] int64.

    Args: cu_seqlens [B + 1]: padded bounds of the whole pack. With cp_size > 1 each sample's length is a multiple of
        2 * cp_size, and the rank holds chunks cp_rank and 2 * cp_size - 1 - cp_rank of each.
    """
    bounds = cu_seqlens.long() // cp_size
    local = torch.arange(num_local, device=cu_seqlens.device)
    sample = torch.searchsorted(bounds, local, right=True) - 1
    within = local - bounds[sample]
    if cp_size == 1:
        return within
    chunk = (bounds[sample + 1] - bounds[sample]) // 2
    last = 2 * cp_size - 1 - cp_rank
    return torch.where(within < chunk, cp_rank * chunk + within, last * chunk + within - chunk)


class _Angles:
    """Cosine and sine of the tokens of a micro-batch: computed by its first layer, reused by all."""

    def __init__(self) -> None:
        # The tensors themselves are kept, so that no other can have the identity of a freed one.
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._settings: tuple[Any, ...] = ()
        self._table: tuple[Tensor, Tensor] | None = None

    def of(
        self, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, group: dist.ProcessGroup, mscale: float, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """[T, P] each, rounded to t's dtype as in Hugging Face."""
        settings = (t.shape[0], t.dtype, group.rank(), group.size(), mscale, interleaved)
        same = self._tensors is not None and self._tensors[0] is cu_seqlens and self._tensors[1] is freqs
        if self._table is None or not same or self._settings != settings:
            positions = packed_positions(cu_seqlens, t.shape[0], group.rank(), group.size())
            half = freqs.shape[-1] // 2
            angle = (freqs[..., 0::2] if interleaved else freqs[..., :half]).reshape(-1, half)[positions]
            self._tensors, self._settings = (cu_seqlens, freqs), settings
            self._table = (angle.cos() * mscale).to(t.dtype), (angle.sin() * mscale).to(t.dtype)
        return self._table


_angles = _Angles()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, paired_in: bool, paired_out: bool) -> Tensor:
        from skyrl_train.kernels.rotary import rotate

        ctx.save_for_backward(cos, sin)
        ctx.paired = paired_in, paired_out
        return rotate(t, cos, sin, paired_in=paired_in, paired_out=paired_out, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from skyrl_train.kernels.rotary import rotate

        cos, sin = ctx.saved_tensors
        paired_in, paired_out = ctx.paired
        grad = rotate(grads[0], cos, sin, paired_in=paired_out, paired_out=paired_in, inverse=True)
        return grad, None, None, None, None


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Rotate t [T / C, heads, head size] by freqs [longest sample, 1, 1, rotary size] -> the same shape.

    Replaces `_apply_rotary_pos_emb_thd` of megatron-core 0.16 to 0.19: one Triton kernel on a GPU, otherwise Megatron's
    unpacked function. `multi_latent_attention` is 0.16's name of `mla_rotary_interleaved`.
    """
    assert cp_group is not None
    paired = bool(mla_rotary_interleaved or multi_latent_attention)
    if kernels.serve(t) and not (paired and rotary_interleaved):
        cos, sin = _angles.of(t, cu_seqlens, freqs, cp_group, mscale, rotary_interleaved)
        return _Rotate.apply(t, cos, sin, paired or rotary_interleaved, rotary_interleaved)
    positions = packed_positions(cu_seqlens, t.shape[0], cp_group.rank(), cp_group.size())
    unpacked = rope_utils._apply_rotary_pos_emb_bshd
    return unpacked(t.unsqueeze(1), freqs[positions], rotary_interleaved, paired, mscale).squeeze(1)


def install() -> None:
    """Make Megatron's unfused path use `rotate_packed`."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
