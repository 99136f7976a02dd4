"""Tensors that tensor parallelism has cut, whole again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Each rank's part, which all have the same shape. A collective where the group has more than one rank."""
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def join_parts(parts: list[Tensor], axis: int, *, is_gated: bool) -> Tensor:
    """Args: is_gated: every part is (gate, up) halves along the axis, and so is the whole."""
    if len(parts) == 1:
        return parts[0]
    if is_gated:
        gates, ups = zip(*(part.chunk(2, dim=axis) for part in parts), strict=True)
        return torch.cat([*gates, *ups], dim=axis)
    return torch.cat(parts, dim=axis)
