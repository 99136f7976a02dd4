"""PPO with a bound on tokens whose logprob and advantage covary, which lower the entropy most.

The covariance of a token is (A - mean A) * (log p - mean log p), over the mini-batch and under the policy before the
step. Source: The Entropy Mechanism of Reinforcement Learning, arXiv:2505.22617, section 4.
"""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio as clip_metric
from skyrl_train.algorithms.losses.ppo import regular
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.ratios import log_ratio
from skyrl_train.algorithms.selection import covariance_within, highest_covariance, selects


@selects(covariance_within)
def clip_cov(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """`regular`, and 0 for `clip_ratio` of the tokens, chosen at random among those of high covariance."""
    terms, metrics = regular(tokens, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    selected = tokens.selected(covariance_within)
    clipped = torch.maximum(metrics["clip_ratio"].values, selected.float())
    share = {"clip_cov_ratio": Metric(selected.float(), Reduce.TOKEN_MEAN)}
    return LossTerms(terms.masked_fill(selected, 0), clip_metric(clipped) | share)


@selects(highest_covariance)
def kl_cov(tokens: TokenInputs, *, ppo_kl_coef: float) -> LossTerms:
    """-ratio * A without a clip, plus ppo_kl_coef * |log ratio| for the tokens of the highest covariance."""
    logs = log_ratio(tokens)
    selected = tokens.selected(highest_covariance)
    penalty = ppo_kl_coef * logs.abs().masked_fill(~selected, 0)
    share = {"kl_cov_ratio": Metric(selected.float(), Reduce.TOKEN_MEAN)}
    return LossTerms(-logs.exp() * tokens.advantages + penalty, share)
