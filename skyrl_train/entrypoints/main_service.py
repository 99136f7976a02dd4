"""Offer training to agents that run elsewhere: `python -m skyrl_train.entrypoints.main_service [key=value ...]`.

Runs until SIGINT or SIGTERM. The service's name is trainer.run_name; agents use it by
`TrainingService.connect(NAME, ADDRESS)`. Exit codes: 0 ended by a signal, 1 it failed, 2 the configuration cannot work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from skyrl_train.config import RL, ConfigError
from skyrl_train.entrypoints.command import Command, prepare
from skyrl_train.service.checks import check_service
from skyrl_train.service.queue import ServiceBroken

PROGRAM = dataclasses.replace(
    RL, module="skyrl_train.entrypoints.main_service", purpose="Offer training to agents that run elsewhere."
)
LOOK_S = 0.5
"""Between looks at the service and at signals."""
COMMAND = Command(program=PROGRAM, check=lambda config, rows, files: check_service(config) if files else None, run="")


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    console = Console()
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: signals.append(which))
    try:
        config = PROGRAM.read(argv)
        prepare(COMMAND, config)
        check_service(config)
        from skyrl_train.service.client import TrainingService  # takes seconds, which a wrong configuration should not

        service = TrainingService.start(config, config.trainer.run_name)
    except (ConfigError, ValueError, RuntimeError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1 if isinstance(error, RuntimeError) else 2
    try:
        lines = [f"service  {service.name} in the Ray cluster {service.address}", f"run      {service.run_dir}"]
        if config.generator.enable_http_endpoint:
            served = f"{service.model_name}@{service.policy_version}"
            lines += [f"engine   serves {served} at {url}" for url in service.openai_base_urls]
        if os.environ.get("RAY_AUTH_MODE") == "token":  # Ray sets it where it starts a cluster by itself
            lines.append("access   agents set RAY_AUTH_MODE=token, and have Ray's token")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)
        while not signals:
            time.sleep(LOOK_S)
            _ = service.policy_version  # raises if the service's process has ended
        console.print("stopping", style="yellow")
    except ServiceBroken as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    finally:
        with contextlib.suppress(ServiceBroken):
            service.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
