"""Controllers: the weight of a term in the next step, from what this step measured."""

from __future__ import annotations

MAX_ERROR = 0.2
"""Largest relative error of the KL divergence that counts, as in the paper, SkyRL, verl and OpenRLHF."""


def adapted_kl_coef(coef: float, kl: float, *, kl_target: float, horizon: int, num_samples: int) -> float:
    """coef * (1 + error * num_samples / horizon), where error is kl / kl_target - 1 within +-0.2.

    A step of more samples than the horizon counts as one of the horizon: with more than five times as many the peers'
    coefficient would become negative, and reward divergence.

    Args: kl: mean over samples of the mean over their tokens; num_samples: of the step.
    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    """
    error = min(max(kl / kl_target - 1, -MAX_ERROR), MAX_ERROR)
    return coef * (1 + error * min(1.0, num_samples / horizon))


def adapted_entropy_coef(coef: float, entropy: float, *, target_entropy: float, delta: float) -> float:
    """coef + delta where the entropy is below its target, else coef - delta, never below 0.

    Source: Skywork Open Reasoner 1, arXiv:2505.22312, section 4, without its switch that turns the term off above the
    target.
    """
    return max(0.0, coef + (delta if entropy < target_entropy else -delta))
