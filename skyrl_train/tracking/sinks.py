"""Destinations of metrics: console, JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import logging
import netrc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

import yaml

from skyrl_train.config.program import to_yaml
from skyrl_train.config.training import RunConfig
from skyrl_train.imports import imported
from skyrl_train.tracking.console import ConsoleSink
from skyrl_train.tracking.jsonl import JsonLinesWriter
from skyrl_train.tracking.names import STEP

log = logging.getLogger(__name__)
MAX_TABLE_ROWS = 1000
"""Largest number of samples in a table at Weights & Biases."""
WANDB_ID = "wandb_run_id"
"""File in the run's folder with its run id at Weights & Biases."""


class Sink(Protocol):
    """One destination of metrics. `log_samples` (like `Tracker.log_samples`) is optional."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step, flushed on return. Steps never go back in a process; after a resume, an
        earlier process may have logged the first steps too.
        """

    def close(self) -> None:
        """Release files and connections; called once."""


class JsonLinesSink:
    """`metrics.jsonl`: one object per call, with `trainer/global_step` and `trainer/unix_time_s` in each."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonLinesWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.write({STEP: step, "trainer/unix_time_s": time.time(), **metrics})

    def close(self) -> None:
        self._writer.close()


class TensorBoardSink:
    """TensorBoard event files. Uses tensorboard's own writer: torch's takes a second longer to import."""

    def __init__(self, log_dir: Path, steps_done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._new_writer = Event, Summary, partial(EventFileWriter, str(log_dir))
        self._writer = self._new_writer()
        if steps_done:  # makes TensorBoard drop later steps of earlier files
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=steps_done + 1, wall_time=time.time(), session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        try:
            self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
            self._writer.flush()
        except Exception:
            self._writer = self._new_writer()  # one whose thread has failed raises that error again at each call
            raise

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; offline without an API key (environment or netrc) and WANDB_MODE.

    A resumed run continues the same wandb run. Rows have no step of wandb's: it would hold back the last row until the
    next step, and drop rows of steps that it has, such as an evaluation that was done only after resuming.

    Raises: RuntimeError if it cannot start.
    """

    def __init__(self, run_dir: Path, config: RunConfig, steps_done: int) -> None:
        import wandb

        self._wandb = wandb
        id_file = run_dir / WANDB_ID
        known = id_file.read_text().strip() if steps_done and id_file.exists() else None
        offline = "WANDB_MODE" not in os.environ and not has_wandb_key()
        if offline:
            log.warning("wandb has no API key: writing an offline run to %s (upload it with `wandb sync`)", run_dir)
        try:
            with _no_arguments():
                self._run = wandb.init(
                    project=config.trainer.project_name,
                    name=config.trainer.run_name,
                    dir=run_dir,
                    config=yaml.safe_load(to_yaml(config)),  # secrets masked
                    mode="offline" if offline else None,
                    id=known,
                    resume="allow" if known else None,
                    # wandb's capture of stdout would replace the console that the progress bar draws on.
                    settings=wandb.Settings(console="off", silent=True),
                )
        except Exception as error:
            raise RuntimeError(
                f"wandb could not start: {error}. Set WANDB_MODE=offline, or remove wandb from trainer.logger"
            ) from error

        self._run.define_metric("*", step_metric=STEP)
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def log_samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the first MAX_TABLE_ROWS samples; what is not a number is text."""
        shown = rows[:MAX_TABLE_ROWS]
        data = [[cell if isinstance(cell, int | float) else _as_text(cell) for cell in row.values()] for row in shown]
        table = self._wandb.Table(columns=list(rows[0]), data=data)
        self._run.log({STEP: step, name: table})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends the service process, which finish() leaves running


def _as_text(cell: Any) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


@contextlib.contextmanager
def _no_arguments() -> Iterator[None]:
    """Hide the command line from wandb (0.31), which uploads it with any secrets."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def has_wandb_key() -> bool:
    """Whether wandb would find a key: WANDB_API_KEY, or the netrc entry of `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False


class Tracker:
    """Passes metrics to every sink. A failing sink is logged once; the run and the other sinks continue."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._failing: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Never raises an error of a sink. A failed sink is tried again at the next step (a disk may have room)."""
        for index, sink in enumerate(self._sinks):
            self._guard(index, partial(sink.log, step, metrics))

    def log_samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass samples to the sinks that show tables (Weights & Biases), before the metrics of their step.
        Args: rows: column -> value of JSON, the same columns in each.
        """
        for index, sink in enumerate(self._sinks):
            if rows and hasattr(sink, "log_samples"):
                self._guard(index, partial(sink.log_samples, step, name, rows))

    def close(self) -> None:
        """Close all sinks; a second call does nothing."""
        for index, sink in enumerate(self._sinks):
            self._guard(index, sink.close)
        self._sinks = []

    def _guard(self, index: int, call: Callable[[], None]) -> None:
        name = type(self._sinks[index]).__name__
        try:
            call()
        # Any error of a sink's library: metrics must not end a training run.
        except (Exception, SystemExit) as error:
            if index not in self._failing:
                log.warning("%s failed, training continues without it: %s: %s", name, type(error).__name__, error)
            self._failing.add(index)


def build_tracker(config: RunConfig, run_dir: Path, total_steps: int | None = None, steps_done: int = 0) -> Tracker:
    """The tracker for `trainer.logger`; each sink writes below `run_dir`. A user's `module:Class` is built from
    (run_dir, config, steps_done).

    Args: total_steps: None if unknown; steps_done: steps of a resumed run before the first call of `log`.
    """
    builders: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(total_steps=total_steps),
        "jsonl": lambda: JsonLinesSink(run_dir / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardSink(run_dir / "tensorboard", steps_done),
        "wandb": lambda: WandbSink(run_dir, config, steps_done),
    }

    def built(name: str) -> Sink:
        if name in builders:
            return builders[name]()
        sink: Sink = imported("trainer.logger", name)(run_dir, config, steps_done)
        return sink

    return Tracker([built(name) for name in dict.fromkeys(config.trainer.logger)])
