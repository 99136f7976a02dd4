"""Training from a script or a notebook: `skyrl_train.run(skyrl_train.load_config(experiment="quickstart"))`.

Not called `run`: importing a submodule of that name would replace the function `skyrl_train.run`.
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
"""Between looks for Ctrl-C: a signal that another thread receives does not wake this one."""


def load_config(
    overrides: Sequence[str] = (), *, experiment: str | None = None, folders: Sequence[str | Path] = ()
) -> Config:
    """The configuration that a command line with these arguments has.

    Args:
        overrides: `key=value`, as on the command line; `extra.NAME=value` for values of your own.
        experiment: name of a file in an `experiment/` folder, as `+experiment=NAME`.
        folders: searched for `experiment/NAME.yaml` beside `./configs` and those of skyrl_train.
    Raises: ConfigError with everything that is wrong.
    """
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    here = [Path("configs")] if Path("configs/experiment").is_dir() else []
    return RL.load([*chosen, *overrides], [*here, *folders])


def run(config: Config, *, experiment: type[Experiment] = Experiment) -> Path:
    """Train, and return the folder of the run. It prints what the command prints.

    Where an event loop runs, as in a notebook, the training has a thread of its own. Ctrl-C, or a notebook's stop
    button, ends it after the step in flight, a second one at once.

    Args: experiment: subclass with parts of your own (`get_rollout`, `get_source`, `get_trainer`, ...).
    Raises: ConfigError for a configuration that cannot work; KeyboardInterrupt for a run that was interrupted; what
        ended a run that failed.
    """
    interrupts = command.Interrupts()
    ended = _beside_a_running_loop(lambda: _run(config, experiment, interrupts), interrupts)
    if ended.error is not None:
        raise ended.error
    if ended.code:
        raise KeyboardInterrupt
    return Path(config.trainer.run_dir).expanduser().resolve()


def _run(config: Config, experiment: type[Experiment], interrupts: command.Interrupts) -> command.Ended:
    training = dataclasses.replace(COMMAND, run=experiment)
    command.prepare(training, config)
    training.check(config, None, True)
    return command.run(training, config, Console(), interrupts)


def _beside_a_running_loop(work: Callable[[], T], interrupts: command.Interrupts) -> T:
    """The result of `work`, which needs an event loop of its own, and a thread has one at most."""
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
