"""A policy loss and a correction of your own; docs/extending.md explains them."""

from skyrl_train.algorithms.inputs import Correction, LossTerms, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce


def soft_clip(tokens: TokenInputs, *, softness: float) -> LossTerms:
    """The ratio's gradient fades with its distance from 1, instead of ending at a bound."""
    log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-20, 20)
    weight = (-softness * log_ratio.detach().square()).exp()
    # One number for each sample, over all of its tokens wherever they are computed.
    drift = tokens.per_sample.mean(log_ratio.detach())
    return LossTerms(
        -weight * log_ratio.exp() * tokens.advantages,
        {"weight": Metric(weight, Reduce.TOKEN_MEAN), "largest_drift": Metric(drift.abs(), Reduce.MAX)},
    )


def drop_surprises(tokens: TokenInputs, *, most_surprise: float) -> Correction:
    """Leave out tokens that the trainer finds much less likely than the engine that sampled them."""
    surprise = tokens.rollout_logprobs - tokens.old_logprobs
    is_kept = (surprise <= most_surprise).float()
    return Correction(is_kept, {"dropped_share": Metric(1 - is_kept, Reduce.TOKEN_MEAN)})
