"""Distillation from a teacher on samples of the policy: as advantages, or as terms of the objective.

All minimise the reverse KL divergence, KL(policy || teacher), except `topk_forward`. The teacher's logprobs are at the
sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs, needs
from skyrl_train.algorithms.metrics import Metric, Reduce


@needs("teacher_logprobs")
def teacher_advantages(tokens: TokenInputs, *, distillation_coef: float) -> Tensor:
    """A - coef * (log p_old - log teacher): each token's reverse KL lowers its advantage. [P], without gradient

    A one-sample estimate of the policy gradient of the reverse KL, without a clamp. The policy loss clips and corrects
    it like any advantage. Source: On-Policy Distillation, thinkingmachines.ai/blog/on-policy-distillation; with
    advantages of 0 MOPD, arXiv:2601.02780.
    """
    return tokens.advantages - distillation_coef * (tokens.old_logprobs - tokens.teacher_logprobs)


@needs("teacher_logprobs")
def kl_to_teacher(tokens: TokenInputs, *, estimator: Callable[[Tensor, Tensor], Tensor]) -> LossTerms:
    """Estimated reverse KL of each sampled token, differentiated through the policy's logprob."""
    return LossTerms(estimator(tokens.logprobs, tokens.teacher_logprobs))


@needs("topk_logprobs")
def topk_forward(tokens: TokenInputs) -> LossTerms:
    """sum t (log t - log p) over the teacher's k likeliest tokens: part of KL(teacher || policy)."""
    teacher = tokens.teacher_topk_logprobs
    return LossTerms((teacher.exp() * (teacher - tokens.topk_logprobs)).sum(-1), _mass(teacher))


@needs("topk_logprobs")
def topk_reverse(tokens: TokenInputs) -> LossTerms:
    """sum p (log p - log t) over the teacher's k likeliest tokens: part of KL(policy || teacher)."""
    policy, teacher = tokens.topk_logprobs, tokens.teacher_topk_logprobs
    return LossTerms((policy.exp() * (policy - teacher)).sum(-1), _mass(teacher))


def _mass(teacher: Tensor) -> dict[str, Metric]:
    return {"teacher_topk_mass": Metric(torch.logsumexp(teacher, -1).exp(), Reduce.TOKEN_MEAN)}
