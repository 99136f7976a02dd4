"""Training service for external agents: `python -m skyrl_train.entrypoints.main_service [key=value ...]`.

Runs until SIGINT or SIGTERM; a second signal kills the remaining processes. The service's name is trainer.run_name;
agents connect with `TrainingService.connect(NAME, ADDRESS)`. Exit codes: 0 ended by a signal or by another program's
`stop`, 1 it failed, can no longer train or has not answered for trainer.timeout_s, 2 invalid configuration, 130 and 143
ended by SIGINT and SIGTERM while it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from skyrl_train.config import Config
from skyrl_train.config.program import secrets_in
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints.command import Command, guarded, prepare
from skyrl_train.entrypoints.ending import print_error, report_failure
from skyrl_train.service.checks import check_service
from skyrl_train.service.queue import ServiceBroken
from skyrl_train.tracking.run_dir import read_record

if TYPE_CHECKING:
    from skyrl_train.service.client import TrainingService

PROGRAM = dataclasses.replace(
    RL, module="skyrl_train.entrypoints.main_service", purpose="Start a training service for external agents."
)
POLL_S = 0.5
"""Seconds between checks of the service."""
COMMAND = Command(program=PROGRAM, check=lambda config, rows, files: check_service(config, files), run="")


def main(argv: Sequence[str]) -> int:
    console = Console()
    return guarded(lambda: _serve(argv, console), console)


def _serve(argv: Sequence[str], console: Console) -> int:
    config = PROGRAM.read(argv)
    prepare(COMMAND, config)
    check_service(config)
    from skyrl_train.service.client import TrainingService  # takes seconds

    try:
        service = TrainingService.start(config, config.trainer.run_name, outlives=False)
    except Exception as error:
        report_failure(error, None, console, secrets_in(config))
        return 2 if isinstance(error, ValueError) else 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also interrupts the wait for a service that hangs
    try:
        _introduce(service, config, console)
        why = _wait_until_broken(service, config.trainer.timeout_s)
        print_error(f"the service can no longer train: {why}", console)
        return 1
    except KeyboardInterrupt:
        console.print("stopping (press Ctrl-C again to stop now)", style="yellow")
    except ServiceBroken as error:
        with contextlib.suppress(ServiceBroken):
            service.stop()
        if read_record(Path(service.run_dir)).get("status") == "finished":
            console.print("the service was stopped by another program", style="yellow")
            return 0
        print_error(str(error), console)
        return 1
    finally:
        with contextlib.suppress(ServiceBroken):
            service.stop()
    return 0


def _wait_until_broken(service: TrainingService, silence_s: float) -> str:
    """The reason why it can no longer train. Raises: ServiceBroken if it has ended.

    Args: silence_s: seconds without an answer after which the service counts as broken.
    """
    answered = time.monotonic()
    while True:
        time.sleep(POLL_S)
        try:
            why, answered = service.broken, time.monotonic()
        except TimeoutError as error:
            why = str(error) if time.monotonic() - answered > silence_s else None
        if why is not None:
            return why


def _introduce(service: TrainingService, config: Config, console: Console) -> None:
    lines = [f"service  {service.name} in the Ray cluster {service.address}", f"run      {service.run_dir}"]
    if config.generator.enable_http_endpoint:
        served = f"{service.model_name}@{service.policy_version}"
        lines += [f"engine   serves {served} at {url}" for url in service.openai_base_urls]
    if os.environ.get("RAY_AUTH_MODE") == "token":  # set by Ray where it starts a cluster itself
        lines.append("access   agents need RAY_AUTH_MODE=token and Ray's token")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
