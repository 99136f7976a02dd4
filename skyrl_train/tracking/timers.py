"""Wall-clock time of the phases of a step.

A phase is a span of time with a name. Spans may nest and overlap, also spans of the same name (two coroutines that both
generate): every time below is the length of a *union* of spans, so no second counts twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from skyrl_train.tracking.names import PHASES

Span = tuple[float, float]
"""Start and end in seconds, start <= end."""

STEP = "step"


def covered_s(spans: Iterable[Span]) -> float:
    """Length in seconds of the union of `spans`."""
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def outside_s(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Seconds covered by `spans` but not by `others`."""
    others = list(others)
    return covered_s([*spans, *others]) - covered_s(others)


class Timers:
    """Records spans by phase name: `with timers("generate"): await collect()`. For one thread (or event loop)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: dict[str, list[Span]] = {}
        self._open: dict[object, tuple[str, float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body, also when it raises or awaits."""
        key = object()
        self._open[key] = (phase, self._clock())
        try:
            yield
        finally:
            _, start = self._open.pop(key)
            self._spans.setdefault(phase, []).append((start, self._clock()))

    def add(self, phase: str, seconds: float) -> None:
        """Record a span that ends now."""
        now = self._clock()
        self._spans.setdefault(phase, []).append((now - seconds, now))

    def spans(self, phase: str) -> list[Span]:
        """Spans of `phase` since the last reset; one that is still open ends now."""
        now = self._clock()
        return self._spans.get(phase, []) + [(start, now) for name, start in self._open.values() if name == phase]

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase since the last reset, as `timing/{phase}`."""
        phases = dict.fromkeys([*self._spans, *(name for name, _ in self._open.values())])
        return {f"timing/{phase}": covered_s(self.spans(phase)) for phase in phases}

    def driver_share(self) -> float:
        """Fraction of the step outside the phases of engines and ranks, 0 to 1; 0 where no step was timed.

        Phases between steps are not part of it, even inside its span.
        """
        step = self.spans(STEP)
        aside = [span for phase in PHASES if not phase.in_step for span in self.spans(phase.key)]
        work = [span for phase in PHASES if phase.in_step and not phase.by_driver for span in self.spans(phase.key)]
        step_s = outside_s(step, aside)
        return max(0.0, outside_s(step, work + aside) / step_s) if step_s > 0 else 0.0

    def reset(self) -> None:
        """Drop all spans; an open one restarts now."""
        now = self._clock()
        self._spans.clear()
        self._open = {key: (phase, now) for key, (phase, _) in self._open.items()}
