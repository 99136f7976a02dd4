"""The loss of a critic."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs, needs
from skyrl_train.algorithms.metrics import Metric, Reduce


@needs("values", "old_values", "returns")
def clipped_value_loss(tokens: TokenInputs, *, value_clip: float | None) -> LossTerms:
    """Half the squared error of the value, or of the value clipped to old_values +- value_clip if that is larger.

    Args: value_clip: None for no clip. Source: PPO's first implementation, github.com/openai/baselines, ppo2.
    """
    values, old, returns = tokens.values, tokens.old_values, tokens.returns
    error = (values - returns).square()
    clipped = error if value_clip is None else (values.clamp(old - value_clip, old + value_clip) - returns).square()
    metrics = {
        "clip_ratio": Metric((clipped > error).detach().float(), Reduce.TOKEN_MEAN),
        "values_mean": Metric(values.detach(), Reduce.TOKEN_MEAN),
    }
    return LossTerms(torch.maximum(error, clipped) / 2, metrics)
