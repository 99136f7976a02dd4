"""What a policy update minimises."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.algorithms.losses import LossSettings


@dataclass(frozen=True, slots=True)
class Objective:
    """sum(loss_weights * (policy term + kl_coef * KL - entropy_coef * entropy)) over the tokens of a mini-batch."""

    loss: str
    """Name in algorithms.losses.LOSSES."""
    settings: LossSettings
    kl_coef: float
    """Weight of KL(policy || reference) in the loss; 0 means no KL term."""
    kl_estimator: str
    entropy_coef: float
    """Weight of the entropy bonus; 0 means none."""
    temperature: float
    """The engines' sampling temperature: logprobs are of the distribution that was sampled."""
    logprobs_chunk_size: int
    """Positions whose float32 logits exist at a time."""
