"""Rotary embedding of packed samples without a loop over them and without waiting for the device.

Megatron's own unfused version reads the sample bounds on the host and, in 0.19, rotates sample by sample: a
micro-batch of 64 short samples took 100 ms on an H200, most of it here. The rotation itself stays Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, num_local: int, cp_rank: int, cp_size: int) -> Tensor:
    """Position within its sample of each token that a context-parallel rank holds, [num_local] int64.

    Args: cu_seqlens [B + 1] are the padded bounds of the whole pack; each sample's length is a multiple of 2 * cp_size
        where cp_size > 1, and the rank holds chunks cp_rank and 2 * cp_size - 1 - cp_rank of each.
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


def rotate_packed(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_group: dist.ProcessGroup | None = None, **settings: Any
) -> Tensor:
    """Rotate t [T / C, heads, head size] by freqs [longest sample, 1, 1, rotary size] -> the same shape.

    Stands for `_apply_rotary_pos_emb_thd` of megatron-core 0.16 to 0.19; settings are passed to its unpacked sibling.
    """
    assert cp_group is not None
    positions = packed_positions(cu_seqlens, t.shape[0], cp_group.rank(), cp_group.size())
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], **settings).squeeze(1)


def install() -> None:
    """Make Megatron's unfused path use `rotate_packed`."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
