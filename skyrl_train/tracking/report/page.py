"""report.html, from the template `page.html`: one file without links to anything outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader

from skyrl_train.tracking.format import compact, number, percent, seconds
from skyrl_train.tracking.names import STEP_TIME, metric_units
from skyrl_train.tracking.report.history import STEP, History, Summary
from skyrl_train.tracking.transcripts import shortened

TILES = (
    ("mean time per step", STEP_TIME, seconds),
    ("tokens/s generated, mean", "perf/generate_tokens_per_s", compact),
    ("tokens/s trained, mean", "perf/train_tokens_per_s", compact),
    ("weight sync GB/s, mean", "perf/sync_gb_per_s", number),
    ("MFU, mean", "perf/mfu", percent),
    ("driver share, mean", "perf/driver_share", percent),
)
"""Label, metric and format of the headline numbers beside the score."""


def page(
    summary: Summary, history: History, svgs: Sequence[tuple[str, int]], samples: Sequence[Mapping[str, Any]]
) -> str:
    """The complete document.

    Args: svgs holds (element, columns of three) of each chart; samples holds transcripts as in samples.jsonl.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {
        "number": lambda value: number(float(value)),
        "shortened": lambda text: shortened(str(text)),
    }
    units = metric_units()
    values_of = {name: [*history.series(name).values()] for name in history.names()}
    return environment.get_template("page.html").render(
        summary=summary,
        svgs=svgs,
        samples=samples,
        tiles=[
            (summary.score_name, summary.score_text()),
            *((label, formatted(fmean(values_of[name]))) for label, name, formatted in TILES if name in values_of),
        ],
        metrics=[
            (name, units.get(name, ""), (values[0], values[-1], min(values), max(values)))
            for name, values in values_of.items()
            if name not in (STEP, "trainer/unix_time_s")
        ],
        versions=" · ".join(f"{package} {version}" for package, version in summary.versions.items()),
    )
