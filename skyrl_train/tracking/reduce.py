"""Metrics that know how they are merged, so that the value over all ranks and micro-batches is the one-process value.

Each rank makes a `dict[str, Stat]` of its own part with `sum_of`, `mean_of`, `max_of` and `min_of`; `reduce_metrics`
turns all of them into floats at once. Hand in one part per *distinct* data: one of the tensor-parallel ranks, not each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How the parts of a metric are merged."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Stat:
    """One part of a metric. Plain floats, so it travels between processes as it is."""

    kind: Kind
    value: float
    """For a mean the weighted *sum*, not yet divided."""
    weight: float = 1.0
    """Of a mean: the sum of weights (tokens, samples) in `value`; not read for the other kinds."""


def sum_of(value: float) -> Stat:
    """A count or total: parts are added."""
    return Stat(Kind.SUM, float(value))


def mean_of(weighted_sum: float, weight: float) -> Stat:
    """A weighted mean given as sum(x * w) and sum(w), so nothing is divided before the last part is in.

    Raises: ValueError if the weight is negative.
    """
    if weight < 0:
        raise ValueError(f"weight of a mean is {weight}, it must be 0 or more")
    return Stat(Kind.MEAN, float(weighted_sum), float(weight))


def max_of(value: float) -> Stat:
    """The largest of all parts."""
    return Stat(Kind.MAX, float(value))


def min_of(value: float) -> Stat:
    """The smallest of all parts."""
    return Stat(Kind.MIN, float(value))


def reduce_stats(stats: Iterable[Stat]) -> float:
    """The value of one metric from its parts; independent of their order, rounded once (`math.fsum`).

    Returns: NaN where a part is NaN (also for max and min), and for a mean of total weight 0.
    Raises: ValueError without a part, or if the parts are of different kinds.
    """
    parts = list(stats)
    kinds = sorted({part.kind for part in parts})
    if len(kinds) != 1:
        raise ValueError(f"parts of a metric must share one kind, got {', '.join(kinds) or 'no part'}")
    values = [part.value for part in parts]
    if any(math.isnan(value) for value in values):
        return math.nan
    match kinds[0]:
        case Kind.SUM:
            return _total(values)
        case Kind.MEAN:
            weight = _total([part.weight for part in parts])
            return _total(values) / weight if weight else math.nan
        case Kind.MAX:
            return max(values)
        case Kind.MIN:
            return min(values)


def reduce_metrics(parts: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """One float per name over all parts; a part that lacks a name adds nothing to it.

    Raises: ValueError naming the metric whose parts are of different kinds.
    """
    by_name: dict[str, list[Stat]] = {}
    for part in parts:
        for name, stat in part.items():
            by_name.setdefault(name, []).append(stat)
    metrics: dict[str, float] = {}
    for name, stats in by_name.items():
        try:
            metrics[name] = reduce_stats(stats)
        except ValueError as error:
            raise ValueError(f"metric {name}: {error}") from error
    return metrics


def _total(values: list[float]) -> float:
    """fsum; for infinities of both signs NaN, where fsum raises."""
    if math.inf in values and -math.inf in values:
        return math.nan
    return math.fsum(values)
