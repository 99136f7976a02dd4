"""All numbers that this project wants to reach on GPUs, measured by one command.

    python -m benchmarks.table [--rows NAME ...] [--folder DIR] [--write docs/readings/gpu.md]

Each row (lib/targets.py) is a command of this package, on as many of the machine's GPUs as it needs. Rows whose time is
largely that of Python run alone; of the others as many at once as there are GPUs, in the order of the table. A row that
has a result in --folder is not measured again, so a command that was interrupted goes on where it was. Prints, and
writes to --write, a table of measured values beside their targets (those of an H200), and for each miss where its time
went. Without --rows all rows that the GPUs of this machine are enough for.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib.main_job import environment
from benchmarks.lib.targets import ROWS, Row
from skyrl_train.device.nvml import devices_in_use

SERIES = ("torch", "vllm", "megatron-core", "transformer-engine", "trl")
POLL_S = 0.5


@dataclass(slots=True)
class Running:
    """A row that is being measured."""

    row: Row
    process: subprocess.Popen[bytes]
    gpus: list[str]
    ends_at: float


def measure(rows: Sequence[Row], gpus: list[str], folder: Path, console: Console) -> None:
    """Run the rows without a result, as many at once as fit on the GPUs; ends them all if interrupted."""
    waiting = [row for row in rows if not result_file(folder, row).exists()]
    free, running = list(gpus), list[Running]()
    try:
        while waiting or running:
            to_come = {row.name for row in waiting} | {each.row.name for each in running}
            for row in [each for each in waiting if each.after not in to_come]:
                must_wait = bool(running) and (row.alone or running[0].row.alone)
                if row.gpus <= len(free) and not must_wait:
                    waiting.remove(row)
                    taken, free = free[: row.gpus], free[row.gpus :]
                    running.append(start(row, taken, folder))
                    console.print(f"{row.name}: started on GPU {', '.join(taken)}")
            time.sleep(POLL_S)
            for each in [one for one in running if ended(one)]:
                running.remove(each)
                free += each.gpus
                fate = (
                    "measured"
                    if result_file(folder, each.row).exists()
                    else f"failed, see {log_file(folder, each.row)}"
                )
                console.print(f"{each.row.name}: {fate}")
    finally:
        for each in running:
            end(each.process)


def start(row: Row, gpus: list[str], folder: Path) -> Running:
    log, scratch = log_file(folder, row), folder / row.name
    scratch.mkdir(exist_ok=True)
    environ = environment() | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command(row, folder),
            cwd=scratch,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(row, process, gpus, time.monotonic() + row.timeout_s)


def command(row: Row, folder: Path) -> list[str]:
    model = ["--model", str(folder / "models" / row.model)] if row.model else []
    return [sys.executable, "-m", *shlex.split(row.command), "--json", str(result_file(folder, row)), *model]


def ended(each: Running) -> bool:
    """Whether the row's process has ended; one that takes too long is ended."""
    if each.process.poll() is None and time.monotonic() > each.ends_at:
        end(each.process)
    return each.process.poll() is not None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def result_file(folder: Path, row: Row) -> Path:
    return folder / f"{row.name}.json"


def log_file(folder: Path, row: Row) -> Path:
    return folder / f"{row.name}.log"


def page(rows: Sequence[Row], folder: Path, device: str) -> str:
    """docs/readings/gpu.md: what every row that was measured reached."""
    files = {row.name: result_file(folder, row) for row in rows}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    lines = [
        "# Targets on GPUs",
        "",
        f"Written on {datetime.date.today()} by `python -m benchmarks.table` on {device}; {versions()}.",
        "Models have random weights. Targets are those of an H200.",
        "",
        "| what | before | target | measured | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines += row_lines(row, found.get(row.name))
    lines += ["", "The commands:", "", "```"]
    lines += [f"python -m {row.command}" for row in rows]
    lines += ["```"]
    missed = [line for row in rows if row.name in found for line in profile(row, found[row.name])]
    return "\n".join([*lines, *(["", "## Where the time of the misses goes", "", *missed] if missed else []), ""])


def row_lines(row: Row, result: Mapping[str, Any] | None) -> Iterator[str]:
    for reading in row.readings:
        value = None if result is None else reading.value(result)
        shown = "not measured" if value is None else reading.shown(value)
        verdict = "" if value is None else "reached" if reading.is_met(value) else "**missed**"
        yield f"| {reading.what} | {reading.before} | {reading.target_text} | {shown} | {verdict} |"


def profile(row: Row, result: Mapping[str, Any]) -> Iterator[str]:
    """Of a row with a miss, the parts that its command measured, the largest first."""
    values = [(reading, reading.value(result)) for reading in row.readings]
    if row.profile is None or all(value is None or reading.is_met(value) for reading, value in values):
        return
    parts = sorted(row.profile(result).items(), key=lambda part: -part[1])
    if parts:
        yield (
            f"- **{row.name}**: " + ", ".join(f"{name} {value:.3g}" for name, value in parts) + f" ({row.profile_unit})"
        )


def versions() -> str:
    found = []
    for name in SERIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def visible() -> tuple[list[str], str]:
    """Numbers of the GPUs that this process may use, and their kind."""
    import torch

    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count:
        return [], ""
    numbers = [str(number) for number in range(count)] if given is None else given.split(",")[:count]
    return numbers, f"{count} x {devices_in_use(1)[0].product}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("table_results"), help="results, logs and models")
    parser.add_argument("--write", type=Path, help="write the page to this file too")
    return parser.parse_args()


def main() -> int:
    args, console = arguments(), Console(highlight=False, markup=False, soft_wrap=True)
    gpus, device = visible()
    if not gpus:
        console.print("error: this command measures GPUs, and there is none here")
        return 2
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    asked = [row for row in ROWS if args.rows is None or row.name in args.rows]
    rows = [row for row in asked if row.gpus <= len(gpus)]
    for row in asked:
        if row not in rows:
            console.print(f"{row.name}: left out, it needs {row.gpus} GPUs and there are {len(gpus)}")
    try:
        measure(rows, gpus, folder, console)
    finally:
        text = page(rows, folder, device)
        print(text)
        if args.write is not None:
            args.write.write_text(text)
    return 0 if all(result_file(folder, row).exists() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
