"""Data and model of `+experiment=yes_no_maybe`: questions, and a tiny model that answers them at random.

The task of OpenPipe ART's smoke test: the reward ignores the question, and the best answer is `maybe`. The warm start
teaches the model to answer `yes`, `no` or `maybe` about equally often.
"""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import is_missing, warm_start, write_missing

MODEL = Path("yes_no_maybe/model")
TRAIN_DATA, VALIDATION_DATA = Path("yes_no_maybe/train.jsonl"), Path("yes_no_maybe/validation.jsonl")
ANSWERS = ("yes", "no", "maybe")
KINDS = ("odd", "even", "small", "big", "nice")
TARGET_SHARE = 0.97
"""Fraction of the warm-started model's samples that are one of the answers."""


def prepare(config: Config) -> None:
    train, validation = question_rows()
    write_missing(config, {TRAIN_DATA: train, VALIDATION_DATA: validation})
    if is_missing(config, MODEL):
        answered, held_out = (
            [(row["prompt"][0]["content"], answer) for row in rows for answer in ANSWERS]
            for rows in (train, validation)
        )
        warm_start(
            MODEL,
            config.trainer.seed,
            task.model_config(),
            answered,
            held_out,
            target=TARGET_SHARE,
            answers_per_prompt=len(ANSWERS),
            summary="{:.0%} of the model's answers are yes, no or maybe",
        )


def question_rows() -> tuple[list[task.Row], list[task.Row]]:
    """Training and validation rows such as `is 37 odd? `; every tenth number is held out."""
    rows = [
        (
            number % 10 == 7,
            {
                "data_source": "yes_no_maybe",
                "prompt": [{"role": "user", "content": f"is {number:02d} {kind}? "}],
                "env_class": "yes_no_maybe",
            },
        )
        for number in range(100)
        for kind in KINDS
    ]
    return [row for is_held_out, row in rows if not is_held_out], [row for is_held_out, row in rows if is_held_out]
