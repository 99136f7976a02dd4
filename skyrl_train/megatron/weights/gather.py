"""Collectives on tensors that are sharded, and on plain data."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device


def shard_group(*, is_expert: bool) -> dist.ProcessGroup:
    """The ranks that share a weight."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def gather_parts(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The part of each rank, all of one shape. A collective if the group has more than one rank."""
    return [part] if group.size() == 1 else _gather(part.contiguous(), group)


def join_parts(parts: list[Tensor], axis: int, *, is_gated: bool) -> Tensor:
    """Args: is_gated: every part is (gate, up) halves along the axis, and so is the result."""
    if len(parts) == 1:
        return parts[0]
    if is_gated:
        gates, ups = zip(*(part.chunk(2, dim=axis) for part in parts), strict=True)
        return torch.cat([*gates, *ups], dim=axis)
    return torch.cat(parts, dim=axis)


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of each rank of the group, by rank. A collective; tuples become lists.

    JSON, because torch's collectives of objects unpickle what they receive: anyone who reaches a rank's port could run
    code. Raises: TypeError if JSON cannot represent the value.
    """
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The bytes of each rank of the group, of any length. A collective."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = [int(size) for size in _gather(torch.tensor([len(data)], device=device()), group)]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device())
    padded[: len(data)] = own
    parts = _gather(padded, group)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
