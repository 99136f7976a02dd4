"""What a loss and a correction read of the tokens, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.algorithms.metrics import Metric

F = TypeVar("F", bound=Callable[..., Any])


class LossTerms(NamedTuple):
    """What a loss returns."""

    terms: Tensor
    """[P], to be minimised, with gradient; any value where the policy did not write the token."""
    metrics: Mapping[str, Metric] = {}
    """Logged as `policy/loss_metrics/NAME`."""


class Correction(NamedTuple):
    """What a correction between engine and trainer returns."""

    factor: Tensor
    """[P]: each token's policy term is multiplied by it; no gradient goes through."""
    metrics: Mapping[str, Metric] = {}
    """Logged as `policy/correction/FUNCTION/NAME`."""


@dataclass(frozen=True, slots=True)
class PerSample:
    """Sums over the tokens of each sample that the policy wrote, on all context-parallel ranks together."""

    sample: Tensor
    """[P] int64: the sample of each position, 0 .. num_samples - 1."""
    num_samples: int
    mask: Tensor
    """[P] bool: the policy wrote the token."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other tokens of the samples; None where all are here."""

    def sum(self, values: Tensor) -> Tensor:
        """[P] -> [P]: each position gets the sum over its sample, with gradient. Summed in float64."""
        sums = values.new_zeros(self.num_samples, dtype=torch.float64)
        sums = sums.index_add(0, self.sample, values.masked_fill(~self.mask, 0).double())
        if self.group is not None:
            sums = _SumOverRanks.apply(sums, self.group)
        return sums[self.sample].to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[P] -> [P]: each position gets the mean over its sample, with gradient; 0 for a sample without a token."""
        return self.sum(values) / self.num_tokens.clamp(min=1)

    @property
    def num_tokens(self) -> Tensor:
        """[P] float32: tokens that the policy wrote of each position's sample."""
        return self.sum(torch.ones_like(self.mask, dtype=torch.float32))


class _SumOverRanks(torch.autograd.Function):
    """Every rank reads the sum, so the gradient of a rank's part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What every predicting position of a rank's micro-batch carries; all tensors [P].

    Besides the logprobs, signals are without gradient. Their values are arbitrary where `loss_mask` is False.
    """

    logprobs: Tensor
    """float32, of the policy that is trained, with gradient."""
    loss_mask: Tensor
    """bool: the policy wrote this token."""
    per_sample: PerSample
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """The properties below by name. A loss reads them as properties, which say what to do where one is missing."""

    @property
    def old_logprobs(self) -> Tensor:
        """float32: of the trainer's policy before the step."""
        return self._signal("old_logprobs")

    @property
    def rollout_logprobs(self) -> Tensor:
        """float32: of the engine when it sampled the token."""
        return self._signal("rollout_logprobs")

    @property
    def advantages(self) -> Tensor:
        """float32"""
        return self._signal("advantages")

    @property
    def staleness(self) -> Tensor:
        """int32: policy versions between sampling and this update; -1 where unknown."""
        return self._signal("staleness")

    @property
    def ref_logprobs(self) -> Tensor:
        """float32: of the reference model, at the sampling temperature."""
        return self._signal("ref_logprobs")

    @property
    def entropy(self) -> Tensor:
        """float32: of the policy's distribution at this position, with gradient."""
        return self._signal("entropy")

    def _signal(self, name: str) -> Tensor:
        if name not in self.signals:
            raise LookupError(
                f"{name} is not computed here. A function that reads it declares it: @needs({name!r}); the policy's "
                "terms of reinforcement learning have old_logprobs, rollout_logprobs, advantages and staleness"
            )
        return self.signals[name]


def needs(*signals: str) -> Callable[[F], F]:
    """Declare what a function reads beside the signals that always exist: `entropy`, `ref_logprobs`."""

    def declare(function: F) -> F:
        function.needs = signals  # type: ignore[attr-defined]
        return function

    return declare
