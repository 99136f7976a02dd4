"""Samples of what engines answered, for tests that train on them."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.types import Generation, Sample, final_reward


def sample(prompt: list[int], generation: Generation, reward: float) -> Sample:
    """What an engine answered to a prompt, in one turn."""
    length = len(prompt)
    return Sample(
        token_ids=torch.tensor(prompt + generation.token_ids),
        loss_mask=torch.tensor([False] * length + [True] * len(generation.token_ids)),
        rollout_logprobs=torch.tensor([0.0] * length + generation.logprobs),
        prompt_length=length,
        rewards=final_reward(length + len(generation.token_ids), reward),
        stop_reason=generation.stop_reason,
        turns=1,
        policy_version=generation.policy_version,
    )


def in_order(values: Tensor, cu_seqlens: Tensor, samples: Tensor) -> Tensor:
    """The tokens of these samples, one after the other."""
    parts = torch.split(values, cu_seqlens.diff().tolist())
    return torch.cat([parts[index] for index in samples.tolist()])
