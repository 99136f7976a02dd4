"""Measured constants of the forecast (readings.yaml, with their sources)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """Constants of memory, in GiB or as fractions."""

    context_gib: float
    communicator_gib: float
    pipeline_communicator_gib: float
    sync_communicator_gib: float
    allocator_fraction: float
    offloaded_gib: float
    sleeping_engine_gib: float
    engine_context_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Fractions of the arithmetic peak that an update reaches."""

    dense: tuple[tuple[int, float], ...]
    experts: float
    adapted_experts: float
    """Fraction of `experts` that is reached if only adapters of them are trained."""
    tensor: Mapping[int, float]
    context: Mapping[int, float]
    expert: Mapping[int, float]
    recomputed: float

    def of_hidden(self, hidden: int) -> float:
        """Interpolated between the hidden sizes that were measured."""
        points = sorted(self.dense)
        for (low, first), (high, second) in pairwise(points):
            if low <= hidden <= high:
                return first + (second - first) * (hidden - low) / (high - low)
        return points[0][1] if hidden < points[0][0] else points[-1][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """Host time for one micro-batch, forward and backward."""

    layer_s: float
    experts_s: float
    """Time of a layer with experts."""
    adapter_s: float
    """Time of the adapters of one of Megatron's linear layers, in addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Cost of an engine step."""

    step_s: float
    sequence_s: float
    memory: float
    arithmetic: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Speed of a weight sync."""

    gb_per_s: float
    tensor_s: float
    """Time of the host for a tensor, while others travel."""
    merged_gb_per_s: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class AllReadings:
    memory: Readings
    utilisation: Utilisation
    launches: Launches
    generation: Generation
    sync: Sync


def at_size(factors: Mapping[int, float], size: int) -> float:
    """The factor of the largest measured size that is at most `size`."""
    return factors[max(known for known in factors if known <= size)]


@functools.cache
def readings() -> AllReadings:
    table = yaml.safe_load(Path(__file__).with_name("readings.yaml").read_text())
    utilisation = table["utilisation"]
    utilisation["dense"] = tuple((int(hidden), float(mfu)) for hidden, mfu in utilisation["dense"])
    return AllReadings(
        Readings(**table["memory"]),
        Utilisation(**utilisation),
        Launches(**table["launches"]),
        Generation(**table["generation"]),
        Sync(**table["sync"]),
    )
