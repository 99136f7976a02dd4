"""Metrics of losses, corrections and estimators, each with its reduction to one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Reduce(Enum):
    """Reduction over all tokens, micro-batches, ranks and optimizer steps."""

    TOKEN_MEAN = "mean over tokens"
    TOKEN_STD = "standard deviation over tokens"
    TOKEN_EFFECTIVE_SHARE = "effective sample size over the number of tokens"
    SAMPLE_MEAN = "mean over samples"
    STEP_MEAN = "sum over the mini-batch, mean over optimizer steps"
    SUM = "sum"
    MAX = "largest value"


WITH_SQUARES = (Reduce.TOKEN_STD, Reduce.TOKEN_EFFECTIVE_SHARE)


@dataclass(frozen=True, slots=True)
class Metric:
    """Values of one micro-batch on one rank."""

    values: Tensor
    """[P], read where the policy wrote the token; for SAMPLE_MEAN equal on all tokens of a sample; for STEP_MEAN a
    scalar, the micro-batch's part of the sum."""
    reduce: Reduce
    mask: Tensor | None = None
    """[P] bool: tokens to reduce over, instead of the policy's; without any, the metric is not logged."""


@dataclass(frozen=True, slots=True)
class Total:
    """A metric of a mini-batch, as sums that can be added to those of other mini-batches."""

    reduce: Reduce
    sums: tuple[float, ...]
    """(sum, number); with the sum of squares between them for TOKEN_STD and TOKEN_EFFECTIVE_SHARE; or the largest value
    alone."""
    is_of_some: bool = False
    """Whether the metric has its own mask; without a token in the mask it is not logged."""

    @property
    def value(self) -> float:
        """The number that is logged."""
        if self.reduce in (Reduce.SUM, Reduce.MAX):
            return 0.0 if self.sums[0] == -math.inf else self.sums[0]
        if self.reduce in WITH_SQUARES:
            total, squares, count = self.sums
            if self.reduce is Reduce.TOKEN_EFFECTIVE_SHARE:
                return total**2 / (squares * count) if squares else 0.0
            mean = total / max(1.0, count)
            return math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
        total, count = self.sums
        return total / (count if self.reduce is Reduce.SAMPLE_MEAN and count else max(1.0, count))

    def __add__(self, other: Total) -> Total:
        if self.reduce is Reduce.MAX:
            return replace(self, sums=(max(self.sums[0], other.sums[0]),))
        return replace(self, sums=tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))

    @property
    def is_absent(self) -> bool:
        """Whether the metric is not logged."""
        return self.is_of_some and self.reduce is not Reduce.SUM and self.sums[-1] in (0, -math.inf)


def partial_sums(metric: Metric, loss_mask: Tensor, tokens_of_sample: Tensor) -> Tensor:
    """A micro-batch's sums, float64; for `Reduce.MAX` the largest value, -inf without a token.

    Args: loss_mask [P] bool; tokens_of_sample [P]: tokens that the policy wrote of each position's sample.
    """
    values = metric.values.detach()
    if metric.reduce is Reduce.STEP_MEAN:
        return values.double().reshape(1)
    mask = loss_mask if metric.mask is None else metric.mask
    if metric.reduce is Reduce.MAX:
        return values.double().masked_fill(~mask, -math.inf).amax().reshape(1)
    values = values.masked_fill(~mask, 0)
    total = values.sum(dtype=torch.float64)
    if metric.reduce is Reduce.SUM:
        return total.reshape(1)
    if metric.reduce is Reduce.SAMPLE_MEAN:
        share = mask / tokens_of_sample.double().clamp(min=1)
        return torch.stack([(values.double() * share).sum(), share.sum()])
    count = mask.sum(dtype=torch.float64)
    if metric.reduce in WITH_SQUARES:
        return torch.stack([total, values.double().square().sum(), count])
    return torch.stack([total, count])


def merged(steps: Sequence[Mapping[str, Total]]) -> dict[str, float]:
    """Name -> value over the optimizer steps that report it; without metrics of some tokens that have none."""
    totals: dict[str, Total] = {}
    for step in steps:
        for name, total in step.items():
            totals[name] = totals[name] + total if name in totals else total
    return {name: total.value for name, total in totals.items() if not total.is_absent}
