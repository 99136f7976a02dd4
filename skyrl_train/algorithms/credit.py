"""Inputs of advantage estimators, and the decorator for those with one number per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Estimator = Callable[..., Tensor]

EPS = 1e-8
"""Added to the variance by `whitened`, as in SkyRL and verl."""


@dataclass(frozen=True, slots=True)
class CreditInputs:
    """All samples of a step, end to end; T tokens, B samples.

    A conversation that is trained as several samples (step-wise trajectories) is one sample here: the tokens of all its
    turns are neighbours, each turn after the prompt that it was sampled from.
    """

    rewards: Tensor
    """[T] float64: each reward is at the token that earned it, such as the last of a turn."""
    loss_mask: Tensor
    """[T] bool: the policy wrote this token."""
    cu_seqlens: Tensor
    """[B + 1] int32, first 0, last T."""
    group_ids: Tensor
    """[B] int64: samples of one prompt are neighbours and share it."""
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [T], the signals that the estimator declared with `needs`: `values` of a critic."""

    named_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [B] float64: each sample's rewards by their names; 0 where a sample lacks one."""
    baselines: Tensor | None = None
    """[B] float64: the reward of a greedy response to the sample's prompt, for estimators that declare it."""

    def sample_sums(self, values: Tensor) -> Tensor:
        """[T] -> [B] float64"""
        parts = torch.split(values.double(), self.cu_seqlens.diff().tolist())
        return torch.stack([part.sum() for part in parts])

    @property
    def sample_rewards(self) -> Tensor:
        """[B] float32, so that the mean of equal rewards, in float64, is exactly that reward."""
        return self.sample_sums(self.rewards).float()

    def at_tokens(self, values: Tensor) -> Tensor:
        """[B] -> [T]"""
        return torch.repeat_interleave(values, self.cu_seqlens.diff().long())


def per_sample(estimator: Estimator) -> Estimator:
    """Mark f(rewards [B] float32, group_ids [B], *, parameters) -> [B] as an estimator.

    Its rewards are sums over samples; every token gets its sample's advantage.
    """
    estimator.is_per_sample = True  # type: ignore[attr-defined]
    return estimator


def compares_samples(estimator: Estimator) -> Estimator:
    """Mark an estimator whose advantages are 0 in a group of one sample."""
    estimator.compares_samples = True  # type: ignore[attr-defined]
    return estimator


def compares_with_greedy(estimator: Estimator) -> Estimator:
    """Mark an estimator that reads `baselines`: a greedy response is then generated for every prompt."""
    estimator.compares_with_greedy = True  # type: ignore[attr-defined]
    return estimator


def reads_values(estimator: Estimator) -> bool:
    """Whether the estimator needs a critic."""
    return "values" in getattr(estimator, "needs", ())


class AdvantagesAndReturns(NamedTuple):
    """Result of an estimator that reads values."""

    advantages: Tensor
    """[T]"""
    returns: Tensor | None
    """[T]: what the critic learns to predict; None from estimators without a critic."""


def assign_credit(estimator: Estimator, inputs: CreditInputs, parameters: Mapping[str, object]) -> AdvantagesAndReturns:
    """[T] float32 each.

    Raises: ValueError if the estimator returns another shape or a number that is not finite.
    """
    if getattr(estimator, "is_per_sample", False):
        rewards = inputs.sample_rewards
        of_samples = estimator(rewards, inputs.group_ids, **parameters)
        result = inputs.at_tokens(_checked(of_samples, len(rewards), estimator))
        return AdvantagesAndReturns(result.float(), None)
    result = estimator(inputs, **parameters)
    given = result if isinstance(result, tuple) else (result,)
    if len(given) != (2 if reads_values(estimator) else 1):
        expected = "AdvantagesAndReturns, because it reads values" if reads_values(estimator) else "one tensor"
        raise ValueError(
            f"the advantage estimator {_name(estimator)} returned {len(given)} values: expected {expected}"
        )
    tensors = [_checked(values, len(inputs.rewards), estimator).float() for values in given]
    return AdvantagesAndReturns(tensors[0], tensors[1] if len(tensors) > 1 else None)


def advantages(estimator: Estimator, inputs: CreditInputs, parameters: Mapping[str, object]) -> Tensor:
    """The advantages of `assign_credit`."""
    return assign_credit(estimator, inputs, parameters).advantages


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + eps) with the mean and the sample variance of the masked values. [T] float64

    Values are rounded to float32 first, so that equal ones are exactly at their mean, whose sum is in float64.
    """
    values = values.float().double()
    trained = values[mask]
    centred = values - (trained.mean() if len(trained) else 0.0)
    variance = trained.var() if len(trained) > 1 else trained.new_zeros(())
    return centred * (variance + EPS).rsqrt()


def _checked(result: Tensor, size: int, estimator: Estimator) -> Tensor:
    name = _name(estimator)
    if not isinstance(result, Tensor) or result.shape != (size,):
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"the advantage estimator {name} returned {given}: it must return a tensor of shape ({size},)")
    if not bool(torch.isfinite(result).all()):
        raise ValueError(
            f"the advantage estimator {name} returned a number that is not finite: it must return finite numbers"
        )
    return result


def _name(estimator: Estimator) -> str:
    return getattr(estimator, "__name__", str(estimator))
