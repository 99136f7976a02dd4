"""Plain data of every rank on every rank, as JSON: torch's collectives of objects unpickle what arrives, which may run
code of whoever reaches a rank's port."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.device import device


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group gives, by rank. A collective; tuples arrive as lists.

    Raises: TypeError for what JSON does not have.
    """
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The bytes of each rank of the group, which may be of any length. A collective."""
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
