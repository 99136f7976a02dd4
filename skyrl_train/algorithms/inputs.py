"""Inputs and outputs of losses and corrections."""

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
    """Output of a loss."""

    terms: Tensor
    """[P], minimised, with gradient; arbitrary where the policy did not write the token."""
    metrics: Mapping[str, Metric] = {}
    """Logged as `policy/loss_metrics/NAME`."""


class Correction(NamedTuple):
    """Output of a correction between engine and trainer."""

    factor: Tensor
    """[P]: multiplies each token's policy term; without gradient."""
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
    """Ranks with the other tokens of the samples; None if all are local."""

    def sum(self, values: Tensor) -> Tensor:
        """[P] -> [P]: sum over each position's sample in float64, with gradient."""
        sums = values.new_zeros(self.num_samples, dtype=torch.float64)
        sums = sums.index_add(0, self.sample, values.masked_fill(~self.mask, 0).double())
        if self.group is not None:
            sums = _SumOverRanks.apply(sums, self.group)
        return sums[self.sample].to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """[P] -> [P]: mean over each position's sample, with gradient; 0 for a sample without a token."""
        return self.sum(values) / self.num_tokens.clamp(min=1)

    @property
    def num_tokens(self) -> Tensor:
        """[P] float32: number of tokens that the policy wrote in each position's sample."""
        return self.sum(torch.ones_like(self.mask, dtype=torch.float32))


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the sum of all ranks' gradients, because every rank reads the sum."""

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
    """Inputs at every predicting position of a rank's micro-batch; all tensors [P].

    Only logprobs, entropy and values have a gradient. Values are arbitrary where `loss_mask` is False.
    """

    logprobs: Tensor
    """float32, of the current policy, with gradient; in the loss of a critic its values."""
    loss_mask: Tensor
    """bool: the policy wrote this token."""
    per_sample: PerSample
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """The properties below by name. Losses read the properties, whose error says how to declare a missing one."""

    @property
    def old_logprobs(self) -> Tensor:
        """float32, of the trainer's policy before the step."""
        return self._signal("old_logprobs")

    @property
    def rollout_logprobs(self) -> Tensor:
        """float32, of the engine when it sampled the token."""
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
        """float32, of the reference model, at the sampling temperature."""
        return self._signal("ref_logprobs")

    @property
    def teacher_logprobs(self) -> Tensor:
        """float32, of the teacher, at the sampling temperature."""
        return self._signal("teacher_logprobs")

    @property
    def topk_logprobs(self) -> Tensor:
        """[P, k] float32, of the policy, with gradient: at the teacher's k likeliest tokens."""
        return self._signal("topk_logprobs")

    @property
    def teacher_topk_logprobs(self) -> Tensor:
        """[P, k] float32, of the teacher, at its k likeliest tokens."""
        return self._signal("teacher_topk_logprobs")

    @property
    def entropy(self) -> Tensor:
        """float32, of the policy's distribution, with gradient."""
        return self._signal("entropy")

    @property
    def values(self) -> Tensor:
        """float32, of the critic, with gradient: the value of the state in which the token was sampled."""
        return self._signal("values")

    @property
    def old_values(self) -> Tensor:
        """float32, of the critic before the step."""
        return self._signal("old_values")

    @property
    def returns(self) -> Tensor:
        """float32, of the advantage estimator."""
        return self._signal("returns")

    def selected(self, selection: Callable[..., Tensor]) -> Tensor:
        """bool: tokens that a selection declared with `selects` has chosen (selection.py)."""
        return self._signal(f"selected_by_{selection.__name__}")

    def _signal(self, name: str) -> Tensor:
        if name not in self.signals:
            raise LookupError(
                f"{name} is not computed here. Declare it with @needs({name!r}). Policy losses always have "
                "old_logprobs, rollout_logprobs, advantages and staleness"
            )
        return self.signals[name]


def needs(*signals: str) -> Callable[[F], F]:
    """Declare optional signals that a function reads: entropy, ref_logprobs, teacher_logprobs, topk_logprobs; a
    selection: `old_entropy`, ...
    """

    def declare(function: F) -> F:
        function.needs = signals  # type: ignore[attr-defined]
        return function

    return declare
