"""pass@k of an evaluation: the unbiased estimator and its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts."""

    value: float
    standard_error: float | None
    """Sample standard deviation over the prompts (divided by n - 1) over the root of their number: how much the value
    would vary with other prompts of the same kind and other samples. None for a single prompt."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value per prompt."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased pass@k of a prompt with n samples, c of which passed: 1 - C(n - c, k) / C(n, k).

    Its expectation is the probability that k new samples contain one (Chen et al. 2021, arXiv:2107.03374).
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def shown_sizes(num_samples: int) -> Iterator[int]:
    """1, 2, 4, ... below `num_samples`, and `num_samples`."""
    k = 1
    while k < num_samples:
        yield k
        k *= 2
    yield num_samples


def pass_rates(passed: Sequence[Sequence[bool]]) -> dict[int, Estimate]:
    """k -> pass@k. Args: passed: of each prompt, whether each of its samples passed.

    A prompt with fewer than k samples (rollouts of it failed) does not count for this k.
    """
    counts = [(len(samples), sum(samples)) for samples in passed]
    return {
        k: estimate([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in shown_sizes(max(n for n, _ in counts))
    }
