"""Write `report.html` and `report.png` of a run: `python -m skyrl_train.tracking.report.report RUN_DIR`.

Both depend on metrics.jsonl, run.json and samples.jsonl alone, so they can be rebuilt, also for a run that was killed
or is still running.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader

from skyrl_train.tracking.format import compact, number, percent, seconds
from skyrl_train.tracking.jsonl import json_lines
from skyrl_train.tracking.names import STEP, STEP_TIME, metric_units
from skyrl_train.tracking.report.history import History, Summary, load_history, summarize, without_passed_steps
from skyrl_train.tracking.transcripts import shortened

NUM_SAMPLES = 6
"""Transcripts in the report, spread from the first to the last."""
TILES = (
    ("mean time per step", STEP_TIME, seconds),
    ("tokens/s generated, mean", "perf/generate_tokens_per_s", compact),
    ("tokens/s trained, mean", "perf/train_tokens_per_s", compact),
    ("weight sync GB/s, mean", "perf/sync_gb_per_s", number),
    ("MFU, mean", "perf/mfu", percent),
    ("driver share, mean", "perf/driver_share", percent),
)
"""Label, metric and format of the headline numbers beside the score."""


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Write the report of the run in `run_dir`, atomically; return the paths of report.html and report.png.

    Call it after `RunDir.finish`, which writes the status. Raises: ValueError without metrics.jsonl or a step in it.
    """
    # Importing matplotlib takes half a second.
    from skyrl_train.tracking.report.figure import chart_svgs, save_png

    history = load_history(run_dir / "metrics.jsonl")
    summary = summarize(run_dir, history)
    html_path, png_path = run_dir / "report.html", run_dir / "report.png"

    draft = run_dir / ".report.draft"
    save_png(draft, history, summary)
    draft.replace(png_path)
    samples = chosen_samples(run_dir / "samples.jsonl")
    draft.write_text(page(summary, history, chart_svgs(history), samples), encoding="utf-8")
    draft.replace(html_path)
    return html_path, png_path


def chosen_samples(path: Path) -> Sequence[Mapping[str, Any]]:
    """At most NUM_SAMPLES transcripts, evenly from the first to the last; none without a file."""
    if not path.is_file():
        return []
    lines = [{"step": row["step"], "offset": offset} for offset, row in json_lines(path)]
    kept = without_passed_steps(lines, "step")
    if len(kept) > NUM_SAMPLES:
        kept = [kept[round(index * (len(kept) - 1) / (NUM_SAMPLES - 1))] for index in range(NUM_SAMPLES)]
    return [_line_at(path, line["offset"]) for line in kept]


def _line_at(path: Path, offset: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(offset)
        row: dict[str, Any] = json.loads(file.readline())
        return row


def page(
    summary: Summary, history: History, svgs: Sequence[tuple[str, int]], samples: Sequence[Mapping[str, Any]]
) -> str:
    """report.html, from the template `page.html`: one file without links to anything outside it.

    Args: svgs holds (element, columns of three) of each chart; samples holds transcripts as in samples.jsonl.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {
        "number": lambda value: number(float(value)),
        "shortened": lambda text: shortened(str(text)),
    }
    units = metric_units()
    finite = {name: [*history.series(name).values()] for name in history.names()}
    return environment.get_template("page.html").render(
        summary=summary,
        svgs=svgs,
        samples=samples,
        tiles=[
            (summary.score_name, summary.score_text()),
            *((label, formatted(fmean(finite[name]))) for label, name, formatted in TILES if finite.get(name)),
        ],
        metrics=[
            (name, units.get(name, ""), (logged[0], logged[-1], min(values or [math.nan]), max(values or [math.nan])))
            for name, values in finite.items()
            for logged in [[*history.logged(name).values()]]
            if name not in (STEP, "trainer/unix_time_s")
        ],
        versions=" · ".join(f"{package} {version}" for package, version in summary.versions.items()),
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m skyrl_train.tracking.report.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        paths = write_report(Path(arguments[0]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
