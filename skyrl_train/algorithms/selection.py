"""Selections of tokens by a statistic of the whole mini-batch, such as the tokens of highest entropy.

The driver makes them once per mini-batch, before the update, from values of the policy before the step. In the first
optimizer step of an update those are the current values. So every token's selection is known before the first
micro-batch, and no split into ranks and micro-batches, nor the order of the samples, changes it: tokens with equal
values are all selected or all left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import F, needs

if TYPE_CHECKING:
    from skyrl_train.algorithms.objective import Bound


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """All samples of a mini-batch, end to end; T tokens, B samples."""

    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B + 1] int32, first 0, last T."""
    loss_mask: Tensor
    """[T] bool: the policy wrote this token."""
    advantages: Tensor
    """[T] float32"""
    signals: Mapping[str, Tensor]
    """Name -> [T] float32, those that the selection declared with `needs`: `old_logprobs`, `old_entropy`."""


def selects(selection: Callable[..., Tensor]) -> Callable[[F], F]:
    """Declare that a loss or a correction reads `tokens.selected(selection)`.

    Args: selection: f(MiniBatch, *, parameters) -> [T] bool; False is read where the policy did not write the token.
    """

    def declare(function: F) -> F:
        function.selects = selection  # type: ignore[attr-defined]
        return function

    return declare


def selection_of(function: Any) -> Callable[..., Tensor] | None:
    """The selection that a loss or correction declared."""
    return getattr(function, "selects", None)


def selected(selections: Iterable[Bound], batch: MiniBatch) -> dict[str, Tensor]:
    """Signal of `TokenInputs` -> [T] bool. Raises: ValueError if a selection returns anything else."""
    signals = {}
    for selection in selections:
        result = selection(batch)
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.shape != batch.loss_mask.shape:
            raise ValueError(f"the selection {selection.name} must return one bool for each of its tokens")
        signals[f"selected_by_{selection.name}"] = result
    return signals


@needs("old_logprobs")
def covariance_within(batch: MiniBatch, *, clip_ratio: float, clip_cov_lb: float, clip_cov_ub: float) -> Tensor:
    """clip_ratio of the trained tokens (at least one), at random among those of a covariance within the bounds.

    The random numbers come from a digest of each sample's tokens.
    """
    covariance = _covariance(batch)
    eligible = batch.loss_mask & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    return largest(_random(batch), eligible, max(1, int(clip_ratio * int(batch.loss_mask.sum()))))


@needs("old_logprobs")
def highest_covariance(batch: MiniBatch, *, kl_cov_frac: float) -> Tensor:
    """kl_cov_frac of the trained tokens (at least one), those of the highest covariance, where it is above 0."""
    covariance = _covariance(batch)
    number = max(1, int(kl_cov_frac * int(batch.loss_mask.sum())))
    return largest(covariance, batch.loss_mask, number) & (covariance > 0)


@needs("old_entropy")
def highest_entropy(batch: MiniBatch, *, top_entropy_quantile: float) -> Tensor:
    """top_entropy_quantile of the trained tokens (at least one), those at which the policy's entropy is highest."""
    number = 1 + int(top_entropy_quantile * max(0, int(batch.loss_mask.sum()) - 1))
    return largest(batch.signals["old_entropy"], batch.loss_mask, number)


def largest(values: Tensor, eligible: Tensor, number: int) -> Tensor:
    """[T] bool: the eligible tokens with the `number` largest values, and all that equal the last of these."""
    chosen = values[eligible]
    if number >= len(chosen):
        return eligible
    return eligible & (values >= chosen.topk(number).values[-1])


def _covariance(batch: MiniBatch) -> Tensor:
    """[T] float64: (A - mean A) * (log p - mean log p), means over the trained tokens."""
    factors = []
    for values in (batch.advantages.double(), batch.signals["old_logprobs"].double()):
        trained = values[batch.loss_mask]
        factors.append(values - (trained.mean() if len(trained) else 0.0))
    return factors[0] * factors[1]


def _random(batch: MiniBatch) -> Tensor:
    """[T] float64, uniform in [0, 1), the same for equal samples."""
    parts = [torch.zeros(0, dtype=torch.float64)]
    for tokens in torch.split(batch.token_ids, batch.cu_seqlens.diff().tolist()):
        digest = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        parts.append(torch.rand(len(tokens), generator=generator, dtype=torch.float64))
    return torch.cat(parts)
