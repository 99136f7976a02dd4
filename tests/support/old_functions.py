"""A loss and estimators as users of skyrl_train 0.4 write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry, reduce_loss
from torch import Tensor

from skyrl_train.algorithms.tables import ADVANTAGES, LOSSES


def clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    ratio = (log_probs - old_log_probs).exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    loss = reduce_loss(-torch.min(free, bounded), loss_mask, config.loss_reduction, 1)
    assert loss_mask is not None
    share = ((free > bounded).float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"clip_ratio": share.item()}


def two_parts(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, **others: Any) -> Any:
    """A sum of two reductions."""
    mask = others["loss_mask"]
    gain = reduce_loss(log_probs * advantages, mask, config.loss_reduction)
    return 0.25 * reduce_loss(-log_probs, mask, config.loss_reduction) - gain, {}


def mean(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Any = None) -> Any:
    """Reduces by itself."""
    return -(log_probs * advantages * loss_mask).sum() / loss_mask.sum(), {"clip_ratio": 0.0}


def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, grpo_norm_by_std: bool = True, **others: Any
) -> tuple[Tensor, Tensor]:
    rewards = token_level_rewards.sum(-1)
    scores = torch.zeros_like(rewards)
    for uid in set(index):
        members = torch.tensor(index == uid)
        own = rewards[members]
        scores[members] = own - own.mean()
        if grpo_norm_by_std and len(own) > 1:
            scores[members] /= own.std() + 1e-6
    return scores[:, None] * response_mask, scores[:, None] * response_mask


def returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float, config: Any, **others: Any) -> Any:
    """Discounted rewards from each token on."""
    assert config.gamma == gamma
    total, columns = torch.zeros(len(token_level_rewards)), []
    for column in reversed(range(token_level_rewards.shape[1])):
        total = token_level_rewards[:, column] + gamma * total
        columns.append(total)
    return torch.stack(columns[::-1], 1) * response_mask, None


@contextmanager
def registered() -> Iterator[None]:
    """Register all; afterwards the tables are as before, since other tests go over them."""
    kept = [(table, "_entries", dict(table._entries)) for table in (LOSSES, ADVANTAGES)]
    kept += [(registry, "_own", dict(registry._own)) for registry in (PolicyLossRegistry, AdvantageEstimatorRegistry)]
    try:
        for name, loss in {"old_clip": clip, "old_two_parts": two_parts, "old_mean": mean}.items():
            PolicyLossRegistry.register(name, loss)
        for name, estimator in {"old_grpo": grpo, "old_returns": returns}.items():
            AdvantageEstimatorRegistry.register(name, estimator)
        yield
    finally:
        for owner, attribute, entries in kept:
            setattr(owner, attribute, entries)
