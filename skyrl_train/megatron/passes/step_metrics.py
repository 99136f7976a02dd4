"""What the log says of an update: the sums of its optimizer steps, reduced by name."""

from __future__ import annotations

import math

from skyrl_train.megatron.passes.step import PassMetrics
from skyrl_train.types import Metrics


def step_metrics(passes: list[PassMetrics], norms: list[float], lr: float, skipped: int) -> Metrics:
    """Metrics of a step from the sums of its optimizer steps.

    Losses and gradient norms are means over optimizer steps; everything per token is a mean over all tokens trained
    on. The difference to the engine's logprobs is that of the old logprobs, so no update is in it. Entropy is the
    first mini-batch's.
    """

    def mean_over_steps(name: str) -> float:
        return sum(one.sums[name] for one in passes) / len(passes)

    def per_token(name: str, over: list[PassMetrics]) -> float:
        return sum(one.sums[name] for one in over) / max(1.0, sum(one.sums["tokens"] for one in over))

    difference = per_token("rollout_diff", passes)
    variance = max(0.0, per_token("rollout_diff_squared", passes) - difference**2)
    metrics = {
        "policy/final_loss": mean_over_steps("final_loss"),
        "policy/policy_loss": mean_over_steps("policy_loss"),
        "policy/policy_entropy": per_token("entropy", passes[:1]),
        "policy/approx_kl": per_token("old_kl", passes),
        "policy/loss_metrics/clip_ratio": per_token("clipped", passes),
        "policy/rollout_train_logprobs_abs_diff_mean": difference,
        "policy/rollout_train_logprobs_abs_diff_std": math.sqrt(variance),
        "policy/rollout_train_logprobs_abs_diff_max": max(one.largest["rollout_diff"] for one in passes),
        "policy/grad_norm": sum(norms) / len(norms),
        "policy/policy_lr": lr,
        "policy/num_optimizer_steps": float(len(passes)),
        "policy/num_skipped_steps": float(skipped),
    }
    if "kl" in passes[0].sums:
        metrics |= {
            "policy/policy_kl": per_token("kl", passes),
            "policy/policy_kl_max": max(one.largest["kl"] for one in passes),
            "policy/kl_loss": mean_over_steps("kl_loss"),
        }
    for name in ("entropy_loss", "moe_aux_loss"):
        if name in passes[0].sums:
            metrics[f"policy/{name}"] = mean_over_steps(name)
    return metrics
