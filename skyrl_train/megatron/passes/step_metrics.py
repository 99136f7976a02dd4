"""What the log says of an update."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.algorithms.metrics import merged
from skyrl_train.megatron.passes.step import LOGPROB_DIFFERENCE, PassMetrics
from skyrl_train.types import Metrics


def step_metrics(passes: Sequence[PassMetrics], norms: Sequence[float], lr: float, skipped: int) -> Metrics:
    """Metrics of a step from those of its optimizer steps; {} on a rank that has none.

    Losses and gradient norms are means over optimizer steps; everything per token is a mean over all tokens trained
    on. The difference to the engine's logprobs is that of the old logprobs, so no update is in it. Entropy is the
    first mini-batch's.
    """
    if not passes[0].totals:
        return {}
    metrics = merged([one_pass.totals for one_pass in passes])
    metrics.pop(LOGPROB_DIFFERENCE, None)
    return metrics | {
        "policy/grad_norm": sum(norms) / len(norms),
        "policy/policy_lr": lr,
        "policy/num_optimizer_steps": float(len(passes)),
        "policy/num_skipped_steps": float(skipped),
    }
