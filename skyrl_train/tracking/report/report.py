"""Write `report.html` and `report.png` of a run: `python -m skyrl_train.tracking.report.report RUN_DIR`.

Both depend on metrics.jsonl, run.json and samples.jsonl alone, so they can be rebuilt, also for a run that was killed
or is still running.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.tracking.jsonl import read_json_lines
from skyrl_train.tracking.report.history import load_history, summarize, without_passed_steps
from skyrl_train.tracking.report.page import page

NUM_SAMPLES = 6
"""Transcripts in the report, spread from the first to the last."""


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
    samples = without_passed_steps(read_json_lines(path) if path.is_file() else [], "step")
    if len(samples) <= NUM_SAMPLES:
        return samples
    return [samples[round(index * (len(samples) - 1) / (NUM_SAMPLES - 1))] for index in range(NUM_SAMPLES)]


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
