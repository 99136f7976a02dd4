"""Learning rate of each optimizer step."""

from __future__ import annotations

import math

from skyrl_train.config.policy import OptimizerConfig


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `num_steps`.

    Warm-up rises linearly and reaches lr with its last step; linear and cosine then fall to min_lr_ratio * lr at the
    last step.
    """
    if step < config.num_warmup_steps:
        return config.lr * (step + 1) / config.num_warmup_steps
    if config.scheduler == "constant_with_warmup":
        return config.lr
    falling = max(1, num_steps - 1 - config.num_warmup_steps)
    progress = min(1.0, (step - config.num_warmup_steps) / falling)
    share = 1 - progress if config.scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
