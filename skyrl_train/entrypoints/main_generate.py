"""Evaluate a model, or a checkpoint of a run, on data.val_data, without training:

python -m skyrl_train.entrypoints.main_generate trainer.policy.model.path=PATH data.val_data=[FILE] [key=value ...]
python -m skyrl_train.entrypoints.main_generate +experiment=NAME trainer.resume_mode=latest [key=value ...]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from skyrl_train.checks.generation import check_generation
from skyrl_train.checks.training import MODEL
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints.command import Command, execute

__all__ = ["COMMAND", "main"]

PROGRAM = dataclasses.replace(
    RL,
    module="skyrl_train.entrypoints.main_generate",
    purpose="Evaluate a model or a checkpoint on data.val_data: pass@k with error bars, and all samples in files.",
    base_name="generate_base_config",
)
COMMAND = Command(
    program=PROGRAM,
    check=lambda config, rows, files: check_generation(config, files),
    run="skyrl_train.entrypoints.generation:Generation",
    has_report=False,
)


def main(argv: Sequence[str]) -> int:
    """Evaluate what the command line asks for and return the exit code."""
    names_model = any(text.lstrip("+").startswith(f"{MODEL}=") for text in argv)
    run = "skyrl_train.entrypoints.generation:NamedGeneration" if names_model else COMMAND.run
    return execute(dataclasses.replace(COMMAND, run=run), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
