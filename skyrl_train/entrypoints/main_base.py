"""Train by reinforcement learning: `python -m skyrl_train.entrypoints.main_base +experiment=NAME [key=value ...]`."""

from __future__ import annotations

import sys
from functools import partial

from skyrl_train.checks.rl import check
from skyrl_train.config import config_dir
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints.command import Command, execute

__all__ = ["COMMAND", "config_dir", "main"]

COMMAND = Command(program=RL, check=check, run="skyrl_train.entrypoints.experiment:Experiment")
main = partial(execute, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
