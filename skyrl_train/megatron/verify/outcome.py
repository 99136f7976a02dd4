"""Results of a mini-batch, the difference of two of them, and bounds on rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skyrl_train.types import Metrics


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a mini-batch from all ranks, equal for all layouts up to rounding."""

    gradients: dict[str, Tensor]
    """Hugging Face's (for adapters PEFT's) name -> whole gradient, float32 on the CPU."""
    logprobs: Tensor
    """[T] float32, in the order of the experience; 0 for the first token of a sample."""
    metrics: Metrics
    """Metrics as logged by the trainer."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of an outcome from a reference."""

    tensors: dict[str, float]
    """|g - r| / |r| of each tensor, 2-norms."""
    gradient: float
    """|g - r| / |r| of all parameters as one vector."""
    logprobs: float
    """Largest |p - p'| / max(1, the largest |p'|): logprobs have the rounding errors of the logits, whose size the
    largest one shows."""
    metrics: dict[str, float]
    """|m - r| / max(1, |r|) of each metric."""

    @property
    def worst_tensor(self) -> tuple[str, float]:
        """(name, value) of the largest of `tensors`."""
        return _worst(self.tensors)

    @property
    def worst_metric(self) -> tuple[str, float]:
        """(name, value) of the largest of `metrics`."""
        return _worst(self.metrics)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences that rounding explains."""

    gradient: float
    worst_tensor: float
    logprobs: float
    metrics: float

    def exceeded(self, difference: Difference) -> list[str]:
        """A sentence for each bound that the difference exceeds."""
        (tensor, worst), (metric, off) = difference.worst_tensor, difference.worst_metric
        values = [
            (difference.gradient, self.gradient, "the gradient"),
            (worst, self.worst_tensor, f"the gradient of {tensor}"),
            (difference.logprobs, self.logprobs, "a logprob, over the largest,"),
            (off, self.metrics, f"the metric {metric}"),
        ]
        # `not <=` also catches NaN.
        return [
            f"{what} is off by {value:.1e}, more than {most:.0e}" for value, most, what in values if not value <= most
        ]


FLOAT32 = Tolerance(gradient=5e-6, worst_tensor=2e-5, logprobs=2e-6, metrics=1e-6)
BFLOAT16 = Tolerance(gradient=5e-2, worst_tensor=2e-1, logprobs=2e-2, metrics=5e-2)
"""Half precision rounds differently in every layout; a wrong factor still exceeds it by far."""


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """Raises: ValueError if the two do not name the same tensors or metrics."""
    _same_names("gradients", outcome.gradients, reference.gradients)
    _same_names("metrics", outcome.metrics, reference.metrics)
    squares = {
        name: (
            float((outcome.gradients[name].double() - gradient.double()).square().sum()),
            float(gradient.double().square().sum()),
        )
        for name, gradient in reference.gradients.items()
    }
    return Difference(
        tensors={name: _ratio(error, size) for name, (error, size) in squares.items()},
        gradient=_ratio(sum(error for error, _ in squares.values()), sum(size for _, size in squares.values())),
        logprobs=_largest(outcome.logprobs - reference.logprobs) / max(1.0, _largest(reference.logprobs)),
        metrics={
            name: abs(outcome.metrics[name] - value) / max(1.0, abs(value)) for name, value in reference.metrics.items()
        },
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _worst(values: Mapping[str, float]) -> tuple[str, float]:
    # NaN compares false with every number, so `max` by value alone would miss it.
    return max(values.items(), key=lambda item: (math.isnan(item[1]), item[1]))


def _ratio(error: float, size: float) -> float:
    """Root of error / size; of the error alone if the reference is 0."""
    return math.sqrt(error / size) if size > 0 else math.sqrt(error)


def _same_names(kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if mine.keys() != theirs.keys():
        more, less = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        raise ValueError(f"{kind} differ in their names: {more} are only in the first, {less} only in the second")
