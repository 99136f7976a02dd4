"""Modules and names of skyrl_train 0.4: `module:attribute` below skyrl_train, or `!` and what replaces the name."""

from __future__ import annotations

_FUNCTIONS = {
    **dict.fromkeys(
        ("compute_advantages_and_returns", "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage"),
        "!the driver calls the estimator of trainer.algorithm.advantage_estimator",
    ),
    "normalize_advantages_dict": "!set trainer.algorithm.advantage_batch_normalize=true",
    "ppo_policy_loss": "!the built-in losses are per token: skyrl_train.algorithms.losses",
}
_PPO_UTILS = {
    **{
        name: f"compat.registries:{name}"
        for name in (
            *("AdvantageEstimator", "AdvantageEstimatorRegistry", "PolicyLossType", "PolicyLossRegistry"),
            *("register_advantage_estimator", "register_policy_loss", "sync_registries"),
        )
    },
    "reduce_loss": "compat.losses:reduce_loss",
    "masked_mean": "compat.losses:masked_mean",
    **_FUNCTIONS,
}
OLD: dict[str, dict[str, str]] = {
    "skyrl_train.utils": {},
    "skyrl_train.utils.ppo_utils": _PPO_UTILS,
    "skyrl_train.utils.torch_utils": {"masked_mean": "compat.losses:masked_mean"},
}
"""Module that exists in 0.4 alone -> its names."""
ADDED: dict[str, dict[str, str]] = {}
"""Module that exists here too -> names that only 0.4 has."""
REFUSED: dict[str, str] = {}
"""Module of 0.4 -> what replaces it."""
