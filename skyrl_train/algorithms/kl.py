"""Per-token estimators of the KL divergence from the policy to the reference, on tokens sampled from the policy.

All have one signature: logprobs [T] (of the policy, with gradient where used as a loss) and ref_logprobs [T] -> [T].
Source: J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.algorithms.ratios import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log ref: unbiased, of either sign. No clamp.

    As a loss its expected gradient is zero (the score function); use it in the reward.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log ref)^2 / 2: biased value, never negative; its gradient is the unbiased one of the KL. No clamp."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """ref/p - 1 - log(ref/p): unbiased, never negative, low variance. Gradient 1 - ref/p.

    log(ref/p) is clamped from above at 20, where the value is 4.9e8 and the gradient becomes 0; from below the term is
    linear and needs no clamp. `expm1` keeps the value exact for close policies, where `exp(d) - 1 - d` cancels.
    Source: also equation 4 of DeepSeekMath, arXiv:2402.03300.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log p - log ref|: no estimate of the KL divergence; its gradient has one size at any distance."""
    return (logprobs - ref_logprobs).abs()


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of `k1` with the gradient of `k2`, which is the unbiased one of the KL. Source: verl."""
    return _with_gradient_of_k2(k1, logprobs, ref_logprobs)


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of `k3` with the gradient of `k2`. Source: verl."""
    return _with_gradient_of_k2(k3, logprobs, ref_logprobs)


def absolute_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of `absolute` with the gradient of `k2`. Source: verl."""
    return _with_gradient_of_k2(absolute, logprobs, ref_logprobs)


def _with_gradient_of_k2(value: Callable[[Tensor, Tensor], Tensor], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    gradient = k2(logprobs, ref_logprobs)
    return value(logprobs.detach(), ref_logprobs) + gradient - gradient.detach()
