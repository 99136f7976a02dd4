"""REINFORCE with a smooth weight of the whole sample's ratio."""

from __future__ import annotations

import math

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.ratios import MAX_LOG_RATIO, log_ratio

MIN_LOG_RATIO = math.log(1e-8)


def vespo(
    tokens: TokenInputs,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> LossTerms:
    """-phi * A * log p with phi = W^k * exp(lambda * (1 - W)), W the product of the sample's ratios, phi constant.

    phi is 1 at W = 1 and falls on both sides; k and lambda are chosen by the sign of A. log W is kept between
    log(1e-8) and 20. Source: Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693; TRL's bounds.
    """
    advantages = tokens.advantages
    log_weight = tokens.per_sample.sum(log_ratio(tokens).detach()).clamp(MIN_LOG_RATIO, MAX_LOG_RATIO)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    decay = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return LossTerms(-phi * advantages * tokens.logprobs, {"phi": Metric(phi, Reduce.SAMPLE_MEAN)})
