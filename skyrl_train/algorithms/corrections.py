"""Corrections for differences between the engine's and the trainer's distribution: factors of the policy terms.

The importance weight of a token is w = exp(old_logprobs - rollout_logprobs): the policy before the step against the
engine that sampled. Corrections multiply the terms of any policy loss, and each other; a factor of 0 drops a token and
leaves the denominators of the reduction unchanged. Log-weights, and their sums over a sample, are clamped at +-20.
"""

from __future__ import annotations

from torch import Tensor

from skyrl_train.algorithms.inputs import Correction, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.ratios import clamped
from skyrl_train.algorithms.selection import highest_entropy, selects


def token_tis(tokens: TokenInputs, *, token_tis_ratio_clip_high: float) -> Correction:
    """Truncated importance sampling: each token weighs min(w, token_tis_ratio_clip_high).

    Source: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, fengyao.notion.site/off-policy-rl
    """
    weight = _log_weight(tokens).exp()
    above = _share("tis_token_clip_high_ratio", weight > token_tis_ratio_clip_high)
    return Correction(weight.clamp(max=token_tis_ratio_clip_high), _weights(weight) | above)


def sequence_tis(tokens: TokenInputs, *, sequence_tis_ratio_clip_high: float) -> Correction:
    """Truncated importance sampling of samples: each token weighs min(product of the sample's w, the bound).

    Source: as `token_tis`; unbiased in the limit of a large bound, where `token_tis` is not.
    """
    weight = _sum(tokens).exp()
    above = _share("tis_seq_clip_high_ratio", weight > sequence_tis_ratio_clip_high, Reduce.SAMPLE_MEAN)
    mean = {"is_ratio_mean": Metric(weight, Reduce.SAMPLE_MEAN), "is_ratio_max": Metric(weight, Reduce.MAX)}
    return Correction(weight.clamp(max=sequence_tis_ratio_clip_high), mean | above)


def icepop(tokens: TokenInputs, *, icepop_low: float, icepop_high: float) -> Correction:
    """Each token weighs w where icepop_low <= w <= icepop_high, and 0 elsewhere.

    Source: Small Leak Can Sink a Great Ship, ringtech.notion.site/icepop
    """
    weight = _log_weight(tokens).exp()
    outside = (weight < icepop_low) | (weight > icepop_high)
    masked = _share("icepop_masked_ratio", outside)
    return Correction(weight.masked_fill(outside, 0), _weights(weight) | masked)


def token_mask(
    tokens: TokenInputs, *, token_mask_is_threshold_low: float, token_mask_is_threshold_high: float
) -> Correction:
    """Tokens whose w is outside the bounds are dropped, the others are not weighted."""
    weight = _log_weight(tokens).exp()
    outside = (weight < token_mask_is_threshold_low) | (weight > token_mask_is_threshold_high)
    return Correction((~outside).float(), _weights(weight) | _share("token_masked_ratio", outside))


def geometric_mask(tokens: TokenInputs, *, geo_mask_low: float, geo_mask_high: float) -> Correction:
    """Samples whose geometric mean of w is outside the bounds are dropped."""
    mean = clamped(tokens.per_sample.mean(_log_weight(tokens))).exp()
    outside = (mean < geo_mask_low) | (mean > geo_mask_high)
    return Correction((~outside).float(), _share("geo_masked_ratio", outside, Reduce.SAMPLE_MEAN))


def product_mask(tokens: TokenInputs, *, product_mask_low: float, product_mask_high: float) -> Correction:
    """Samples whose product of w is outside the bounds are dropped: stricter the longer a sample is."""
    product = _sum(tokens).exp()
    outside = (product < product_mask_low) | (product > product_mask_high)
    return Correction((~outside).float(), _share("product_masked_ratio", outside, Reduce.SAMPLE_MEAN))


def outlier_mask(
    tokens: TokenInputs, *, outlier_token_is_threshold_low: float, outlier_token_is_threshold_high: float
) -> Correction:
    """Samples with any token whose w is outside the bounds are dropped: a single such token is a sign of corruption."""
    weight = _log_weight(tokens).exp()
    outside = (weight < outlier_token_is_threshold_low) | (weight > outlier_token_is_threshold_high)
    dropped = tokens.per_sample.sum(outside.float()) > 0
    return Correction((~dropped).float(), _share("outlier_masked_ratio", dropped, Reduce.SAMPLE_MEAN))


def opsm(tokens: TokenInputs, *, opsm_delta: float) -> Correction:
    """Off-policy sequence masking: where A < 0 and the sample has become less likely by more than opsm_delta nats per
    token since the step began, its tokens are dropped.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    moved = tokens.per_sample.mean((tokens.old_logprobs - tokens.logprobs).detach())
    dropped = (tokens.advantages < 0) & (moved > opsm_delta)
    return Correction((~dropped).float(), _share("opsm_masked_ratio", dropped))


@selects(highest_entropy)
def top_entropy(tokens: TokenInputs) -> Correction:
    """Only the tokens at which the policy before the step had the highest entropy in the mini-batch are trained.

    Source: Beyond the 80/20 Rule, arXiv:2506.01939, section 5; as in TRL (`top_entropy_quantile`).
    """
    selected = tokens.selected(highest_entropy)
    return Correction(selected.float(), _share("low_entropy_masked_ratio", ~selected))


def _log_weight(tokens: TokenInputs) -> Tensor:
    return clamped((tokens.old_logprobs - tokens.rollout_logprobs).detach())


def _sum(tokens: TokenInputs) -> Tensor:
    """[P]: log of the product of w over each position's sample."""
    return clamped(tokens.per_sample.sum(_log_weight(tokens)))


def _weights(weight: Tensor) -> dict[str, Metric]:
    return {"is_ratio_mean": Metric(weight, Reduce.TOKEN_MEAN), "is_ratio_max": Metric(weight, Reduce.MAX)}


def _share(name: str, where: Tensor, reduce: Reduce = Reduce.TOKEN_MEAN) -> dict[str, Metric]:
    return {name: Metric(where.float(), reduce)}
