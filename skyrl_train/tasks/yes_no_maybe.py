"""Data and model of `+experiment=yes_no_maybe`: questions, and a tiny model that answers them at random.

The task of OpenPipe ART's smoke test: the reward ignores the question, and the best answer is `maybe`. The warm start
teaches the model to answer `yes`, `no` or `maybe` about equally often.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.tasks import quickstart
from skyrl_train.tasks import tiny as task

MODEL = Path("yes_no_maybe/model")
TRAIN_DATA, VALIDATION_DATA = Path("yes_no_maybe/train.jsonl"), Path("yes_no_maybe/validation.jsonl")
ANSWERS = ("yes", "no", "maybe")
KINDS = ("odd", "even", "small", "big", "nice")
TARGET_SHARE = 0.97
"""Fraction of the warm-started model's samples that are one of the answers."""


def prepare(config: Config) -> None:
    """Create the experiment's data and model in the current folder if they do not exist."""
    train_rows, validation_rows = question_rows()
    files = {TRAIN_DATA: train_rows, VALIDATION_DATA: validation_rows}
    quickstart.make_missing(config, files, MODEL, partial(quickstart.run_warm_start, "skyrl_train.tasks.yes_no_maybe"))


def question_rows() -> tuple[list[task.Row], list[task.Row]]:
    """Training and validation rows such as `is 37 odd? `; every tenth number is held out."""
    rows = [(number, _row(f"is {number:02d} {kind}? ")) for number in range(100) for kind in KINDS]
    held_out = [row for number, row in rows if number % 10 == 7]
    return [row for number, row in rows if number % 10 != 7], held_out


def _row(question: str) -> task.Row:
    return {
        "data_source": "yes_no_maybe",
        "prompt": [{"role": "user", "content": question}],
        "env_class": "yes_no_maybe",
    }


def warm_start(folder: Path, seed: int) -> None:
    """Create the model; `folder` appears when it is complete."""
    tokenizer = task.tokenizer()
    train, held_out = (
        [quickstart.example(row["prompt"][0]["content"], answer, tokenizer) for row in rows for answer in ANSWERS]
        for rows in question_rows()
    )
    validation = quickstart.batch_of(held_out)

    def share(policy: quickstart.MegatronPolicy) -> float:
        return len(ANSWERS) * quickstart.sampled_accuracy(policy, validation)

    says = "{:.0%} of the model's answers are yes, no or maybe"
    quickstart.fine_tune(folder, seed, task.model_config(), train, share, TARGET_SHARE, says)


if __name__ == "__main__":
    warm_start(Path(sys.argv[1]), int(sys.argv[2]))
