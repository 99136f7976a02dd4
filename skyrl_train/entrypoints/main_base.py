"""Train by reinforcement learning: `python -m skyrl_train.entrypoints.main_base +experiment=NAME [key=value ...]`.

Exit codes: 0 finished, 1 the run failed, 2 invalid configuration, 130 ended by SIGINT, 143 by SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_train.checks.rl import check
from skyrl_train.config import config_dir
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints.command import Command, execute

__all__ = ["COMMAND", "config_dir", "main"]

COMMAND = Command(program=RL, check=check, run="skyrl_train.entrypoints.experiment:Experiment")


def main(argv: Sequence[str]) -> int:
    """Run a command line and return the exit code."""
    return execute(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
