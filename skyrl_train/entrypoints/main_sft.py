"""Fine-tune on examples: `python -m skyrl_train.entrypoints.main_sft +experiment=NAME [key=value ...]`."""

from __future__ import annotations

import sys
from functools import partial

from skyrl_train.checks.sft import check_sft
from skyrl_train.config.sft import SFT
from skyrl_train.entrypoints.command import Command, execute

__all__ = ["COMMAND", "main"]

COMMAND = Command(program=SFT, check=check_sft, run="skyrl_train.entrypoints.sft_run:SftRun")
main = partial(execute, COMMAND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
