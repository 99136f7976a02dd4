"""Random states for dropout of the adapters' inputs: shared by ranks with the same input, independent on all others.

Megatron's states do not fit: those of a tensor rank are equal on every data- and context-parallel rank and stage, those
of an expert rank on every replica of its experts, so a mini-batch would be trained with a few masks instead of one per
token. The states are in Megatron's tracker, which recomputation rewinds and `state.py` saves.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.nn import functional as F

OF_THIS_RANK = "lora-rng-of-this-rank"
OF_TENSOR_RANKS = "lora-rng-of-tensor-ranks"
"""One state per tensor-parallel group."""
OF_EXPERT_TENSOR_RANKS = "lora-rng-of-expert-tensor-ranks"
"""One state per group of ranks that share each of their experts."""


def seed_dropout(seed: int) -> None:
    """Add the states to the tracker, once, after joining the layout."""
    ranks = dist.get_process_group_ranks
    owners = {
        OF_THIS_RANK: dist.get_rank(),
        # A group is identified by its lowest rank.
        OF_TENSOR_RANKS: min(ranks(parallel_state.get_tensor_model_parallel_group())),
        OF_EXPERT_TENSOR_RANKS: min(ranks(parallel_state.get_expert_tensor_parallel_group())),
    }
    for name, owner in owners.items():
        # Hashed, because the tracker rejects a seed that it has, and sums of seed and rank may coincide.
        digest = hashlib.sha256(f"{seed} {name} {owner}".encode()).digest()
        get_cuda_rng_tracker().add(name, int.from_bytes(digest[:7], "big"))


def drop(x: Tensor, p: float, state: str) -> Tensor:
    """Args: p: probability; state: one of the names above."""
    with get_cuda_rng_tracker().fork(state):
        return F.dropout(x, p)
