"""Reductions of per-token terms to a loss: a weight per token, computed once from the whole mini-batch.

Every term (policy, KL, entropy) is `weighted_sum(terms, loss_weights)`, so the sum over any split into ranks and
micro-batches is the same. A reduction is the divisor of each sample's tokens.

A sample without a trained token (its environment failed, its response was filtered) counts neither as a sample nor
towards a group. So the weights of `token_mean`, `sequence_mean` and `prompt_mean` sum to 1 in every mini-batch with a
trained token, and to 0 otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_train.algorithms.tables import REDUCTIONS


class MaxLengths(NamedTuple):
    """Configured limits in tokens, by which some reductions divide."""

    response: int = 1
    """`generator.sampling_params.max_generate_length`"""
    conversation: int = 1
    """That and `generator.max_input_length` together."""


def token_mean(num_tokens: Tensor, group_ids: Tensor, max_lengths: MaxLengths) -> Tensor:
    """Mean over all trained tokens of the mini-batch (DAPO, arXiv:2503.14476, section 3.3)."""
    return num_tokens.sum().expand_as(num_tokens)


def sequence_mean(num_tokens: Tensor, group_ids: Tensor, max_lengths: MaxLengths) -> Tensor:
    """Mean over samples of the mean over each sample's tokens (GRPO, arXiv:2402.03300, equation 3)."""
    return num_tokens * (num_tokens > 0).sum()


def seq_mean_token_sum_norm(num_tokens: Tensor, group_ids: Tensor, max_lengths: MaxLengths) -> Tensor:
    """Mean over samples of the sum over each sample's tokens / longest conversation, as in SkyRL."""
    return ((num_tokens > 0).sum() * max_lengths.conversation).expand_as(num_tokens)


def dr_grpo(num_tokens: Tensor, group_ids: Tensor, max_lengths: MaxLengths) -> Tensor:
    """Mean over samples of the sum over each sample's tokens / longest response (Dr. GRPO, arXiv:2503.20783).

    The divisor is one constant, so a token weighs the same in a short and in a long response.
    """
    return ((num_tokens > 0).sum() * max_lengths.response).expand_as(num_tokens)


def prompt_mean(num_tokens: Tensor, group_ids: Tensor, max_lengths: MaxLengths) -> Tensor:
    """Mean over groups of the mean over all tokens of the group's samples (ScaleRL, arXiv:2510.13786, section 3.2)."""
    _, group = torch.unique(group_ids, return_inverse=True)
    tokens_of_group = torch.zeros_like(num_tokens).index_add_(0, group, num_tokens)
    return tokens_of_group[group] * (tokens_of_group > 0).sum()


def loss_weights(
    reduction: str, loss_mask: Tensor, cu_seqlens: Tensor, group_ids: Tensor, max_lengths: MaxLengths
) -> Tensor:
    """Weight of each token in the loss of one mini-batch.

    Args: loss_mask [T] bool, cu_seqlens [B + 1], group_ids [B], all of the whole mini-batch (not of one rank);
        max_lengths: constants of `seq_mean_token_sum_norm` and `dr_grpo`.
    Returns: [T] float32, 0 where not loss_mask.
    Raises: ValueError for an unknown reduction.
    """
    divisor_of = REDUCTIONS.resolve(reduction)
    bounds = cu_seqlens.to(torch.int64)
    written = torch.nn.functional.pad(loss_mask.cumsum(0), (1, 0))
    num_tokens = written[bounds].diff()
    share = divisor_of(num_tokens, group_ids, max_lengths).clamp(min=1).to(torch.float64).reciprocal()
    return torch.repeat_interleave(share.to(torch.float32), bounds.diff()).mul_(loss_mask)


def weighted_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """sum(terms * weights), a scalar, over the tokens whose weight is not 0.

    Terms without weight are arbitrary; `objective_loss` drops their derivatives. Args: terms [T], weights [T] float32.
    """
    return torch.where(weights != 0, terms, torch.zeros_like(terms)).mul(weights).sum()
