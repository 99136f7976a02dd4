"""Training from a script or a notebook: `skyrl_train.run(skyrl_train.load_config(experiment="quickstart"))`.

Not named `run`: importing a submodule of that name would replace the function `skyrl_train.run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from skyrl_train.config import Config
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.main_base import COMMAND

T = TypeVar("T")
WAIT_S = 0.5
"""Seconds between checks for Ctrl-C: a signal that another thread receives does not wake this one."""


def load_config(
    overrides: Sequence[str] = (), *, experiment: str | None = None, folders: Sequence[str | Path] = ()
) -> Config:
    """The configuration of a command line with these arguments.

    Args:
        overrides: `key=value`, as on the command line; `extra.NAME=value` for your own values.
        experiment: file name in an `experiment/` folder, as in `+experiment=NAME`.
        folders: also searched for `experiment/NAME.yaml`, besides `./configs` and those of skyrl_train.
    Raises: ConfigError with every problem.
    """
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    here = [Path("configs")] if Path("configs/experiment").is_dir() else []
    return RL.load([*chosen, *overrides], [*here, *folders])


def run(config: Config, *, experiment: type[Experiment] = Experiment) -> Path:
    """Train and return the folder of the run; prints what the command prints.

    With a running event loop, as in a notebook, training has its own thread. Ctrl-C, or a notebook's stop button, ends
    it after the current step, a second one immediately.

    Args: experiment: subclass with your own parts (`get_rollout`, `get_source`, `get_trainer`, ...).
    Raises: ConfigError for an invalid configuration; KeyboardInterrupt if interrupted; the error of a failed run.
    """
    interrupts, training = command.Interrupts(), dataclasses.replace(COMMAND, run=experiment)

    def work() -> command.Ended:
        command.prepare(training, config)
        training.check(config, None, True)
        return command.run(training, config, Console(), interrupts)

    ended = _beside_a_running_loop(work, interrupts)
    if ended.error is not None:
        raise ended.error
    if ended.code:
        raise KeyboardInterrupt
    return Path(config.trainer.run_dir).expanduser().resolve()


def _beside_a_running_loop(work: Callable[[], T], interrupts: command.Interrupts) -> T:
    """The result of `work`, in a separate thread if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="skyrl-train") as thread:
        future = thread.submit(work)
        while not future.done():
            try:
                wait([future], timeout=WAIT_S)
            except KeyboardInterrupt:
                interrupts.request()
        return future.result()
