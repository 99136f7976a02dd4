"""Fine-tune on examples: `python -m skyrl_train.entrypoints.main_sft +experiment=NAME [key=value ...]`.

Exit codes: 0 finished, 1 the run failed, 2 invalid configuration, 130 ended by SIGINT, 143 by SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_train.checks.sft import check_sft
from skyrl_train.config.sft import SFT
from skyrl_train.entrypoints.command import Command, execute

__all__ = ["COMMAND", "main"]

COMMAND = Command(program=SFT, check=check_sft, run="skyrl_train.entrypoints.sft_run:SftRun")


def main(argv: Sequence[str]) -> int:
    """Run a command line and return the exit code."""
    return execute(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
