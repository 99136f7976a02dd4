"""Numbers for people, mostly at most seven characters (except `duration`)."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Four decimals at most, fewer for large values: `0.8125`, `12.35`, `1,024`, `3.0e-06`, `2.4e+07`."""
    if not math.isfinite(value) or (value == int(value) and abs(value) < 1000):
        return f"{value:g}"
    magnitude = abs(value)
    if magnitude < 1e-3 or magnitude >= 1e6:
        return f"{value:.1e}" if value > 0 else f"{value:.0e}"
    if magnitude < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if magnitude < 1000 else f"{value:,.0f}"


def compact(value: float) -> str:
    """With a unit prefix from 10,000 on: `8,123`, `12.3k`, `4.56M`."""
    if not math.isfinite(value) or abs(value) < 10_000:
        return number(value) if abs(value) < 100 else f"{value:,.0f}"
    size, prefix = next(unit for unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= unit[0])
    return f"{value / size:.{1 if abs(value) >= 10 * size else 2}f}{prefix}"


def percent(share: float) -> str:
    """A fraction of 0 to 1 as `12.5 %`."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else f"{share:g}"


def seconds(value: float) -> str:
    """`35 ms`, `1.84 s`, `24.1 s`, `1,250 s`."""
    if not math.isfinite(value):
        return f"{value:g}"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def duration(value_s: float) -> str:
    """`24 s`, `2 min 05 s`, `3 h 07 min`."""
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
