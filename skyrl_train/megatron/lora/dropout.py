"""Random states for dropout of the adapters' inputs: ranks that hold the same input drop the same of it, all others
draw for themselves.

Megatron's own states will not do: a tensor rank has the same one on every data- and context-parallel rank and in every
stage, as does an expert rank on every replica of its experts, so that a mini-batch would be trained with a few masks
instead of one per token. They are kept in Megatron's tracker, which recomputation rewinds and `state.py` saves.
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
"""One for the ranks of a tensor-parallel group."""
OF_EXPERT_TENSOR_RANKS = "lora-rng-of-expert-tensor-ranks"
"""One for the ranks that share each of their experts."""


def seed_dropout(seed: int) -> None:
    """Add the states to the tracker, once after the layout was joined."""
    owners = {
        OF_THIS_RANK: dist.get_rank(),
        # The lowest rank of the group stands for it.
        OF_TENSOR_RANKS: min(_ranks(parallel_state.get_tensor_model_parallel_group())),
        OF_EXPERT_TENSOR_RANKS: min(_ranks(parallel_state.get_expert_tensor_parallel_group())),
    }
    for name, owner in owners.items():
        # The tracker refuses a seed that it has; sums of a seed and ranks may meet.
        digest = hashlib.sha256(f"{seed} {name} {owner}".encode()).digest()
        get_cuda_rng_tracker().add(name, int.from_bytes(digest[:7], "big"))


def drop(x: Tensor, share: float, state: str) -> Tensor:
    """Args: state is one of the names above."""
    with get_cuda_rng_tracker().fork(state):
        return F.dropout(x, share)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)
