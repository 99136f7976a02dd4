"""Training from a script or a notebook: `skyrl_train.run(skyrl_train.load_config(experiment="quickstart"))`.

Not named `run`: importing a submodule of that name would replace the function `skyrl_train.run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console

from skyrl_train.config import Config, ConfigError
from skyrl_train.config.redaction import BY_NAME
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.main_base import COMMAND
from skyrl_train.spelling import nearest

_RUNNING = threading.Lock()
"""Held by the run of this process."""
EXAMPLES = {"overrides": '["trainer.seed=2"]', "folders": '["configs"]'}


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
    for name, given in (("overrides", overrides), ("folders", folders)):
        if isinstance(given, str | Path | Mapping):
            raise ConfigError(f"load_config({name}={given!r}): it must be a list, as {EXAMPLES[name]}")
    given_overrides = list(overrides)
    for index, entry in enumerate(given_overrides):
        if not isinstance(entry, str):
            kind = type(entry).__name__
            raise ConfigError(
                f"load_config(overrides=...): entry {index} is of type {kind}. Write text, as {EXAMPLES['overrides']}"
            )
        if entry.startswith("-"):
            raise ConfigError(
                f"load_config(overrides=...): {BY_NAME.argument(entry)!r} is an option, not key=value. "
                "skyrl_train.config.main_config([...]) reads the options of a command line"
            )
    if missing := [str(folder) for folder in folders if not Path(folder).is_dir()]:
        raise ConfigError(f"load_config(folders=...): there is no folder {', '.join(missing)}")
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    here = [Path("configs")] if Path("configs/experiment").is_dir() else []
    return RL.load([*chosen, *given_overrides], [*here, *folders])


def run(config: Config, *, experiment: type[Experiment] = Experiment) -> Path:
    """Train and return the folder of the run; prints what the command prints.

    With a running event loop, as in a notebook, training has its own thread, and this one waits for it. Ctrl-C, or a
    notebook's stop button, ends training after the current step, a second one immediately.

    Args: experiment: subclass with your own parts (`get_rollout`, `get_source`, `get_trainer`, ...).
    Raises: ConfigError for an invalid configuration, or while another run of this process has not ended;
        KeyboardInterrupt if interrupted; the error of a failed run.
    """
    interrupts = command.Interrupts()
    return command.beside_a_running_loop(partial(_train, config, experiment, interrupts), interrupts)


async def run_async(config: Config, *, experiment: type[Experiment] = Experiment) -> Path:
    """Like `run`, while the event loop of the caller continues: `await skyrl_train.run_async(config)`.

    Cancelling it ends training after the current step, a second time immediately, and then returns.
    """
    interrupts = command.Interrupts()
    thread = ThreadPoolExecutor(1, thread_name_prefix="skyrl-train")
    training = asyncio.wrap_future(thread.submit(_train, config, experiment, interrupts))
    thread.shutdown(wait=False)  # after this run
    cancelled: asyncio.CancelledError | None = None
    while not training.done():
        try:
            await asyncio.wait([training])
        except asyncio.CancelledError as error:
            cancelled = error
            interrupts.request()
    if cancelled is not None:
        training.exception()  # KeyboardInterrupt of the run that was told to stop
        raise cancelled
    return training.result()


def _check(config: object, experiment: object) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"run({config!r}): it must be a configuration, as load_config(experiment='quickstart')")
    if not (isinstance(experiment, type) and hasattr(experiment, "run")):
        raise ConfigError(f"run(experiment={experiment!r}): it must be a subclass of skyrl_train.Experiment")
    for name in vars(experiment):
        known = [each for each in dir(Experiment) if each.startswith("get_")]
        if name.startswith("get_") and name not in known and (meant := nearest(name, known)):
            raise ConfigError(f"{experiment.__name__}.{name} overrides nothing: did you mean {meant}?")


def _train(config: Config, experiment: type[Experiment], interrupts: command.Interrupts) -> Path:
    _check(config, experiment)
    training = dataclasses.replace(COMMAND, run=experiment)
    command.prepare(training, config)  # a function of the user, which may train a model by itself
    training.check(config, None, True)
    if not _RUNNING.acquire(blocking=False):  # a process has one connection to Ray
        raise ConfigError(
            f"trainer.run_name is {config.trainer.run_name}: another run of this process has not ended, and a process "
            "can have one at a time. Await it first, or start this one in its own process"
        )
    try:
        ended = command.run(training, config, Console(), interrupts)
    finally:
        _RUNNING.release()
    if ended.error is not None:
        raise ended.error
    if ended.code:
        raise KeyboardInterrupt
    return Path(config.trainer.run_dir).expanduser().resolve()
