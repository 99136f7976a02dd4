"""Data and model of `+experiment=long_addition`: sums of three digits, and a model that solves some of them.

It has 3.2 million parameters, and enough layers and heads for pipelines of two stages, interleaved ones too, and tensor
parallelism of two or four.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.config import Config
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import is_missing, sums, warm_start, write_missing

if TYPE_CHECKING:
    from transformers import Qwen3Config

MODEL = Path("long_addition/model")
TRAIN_DATA, VALIDATION_DATA = Path("long_addition/train.jsonl"), Path("long_addition/validation.jsonl")
NUM_DIGITS = 3
NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS = 10_000, 500
LEARNING_RATE = 1e-3


def prepare(config: Config) -> None:
    train, validation = long_addition_rows(seed=0)
    write_missing(config, {TRAIN_DATA: train, VALIDATION_DATA: validation})
    if is_missing(config, MODEL):
        model, seed = model_config(), config.trainer.seed
        warm_start(MODEL, seed, model, sums(train), sums(validation), learning_rate=LEARNING_RATE)


def model_config() -> Qwen3Config:
    return task.model_config(num_layers=4, hidden_size=256, intermediate_size=768, num_heads=8, initializer_range=0.05)


def long_addition_rows(seed: int) -> tuple[list[task.Row], list[task.Row]]:
    """Training and validation rows such as `047+508=`, each of another unordered pair of numbers below 1,000.

    So neither `a+b` nor `b+a` of a validation row is in training. 2 % of all pairs occur.
    """
    rng = random.Random(seed)
    sums: dict[frozenset[int], task.Row] = {}
    while len(sums) < NUM_TRAIN_ROWS + NUM_VALIDATION_ROWS:
        a, b = rng.randrange(10**NUM_DIGITS), rng.randrange(10**NUM_DIGITS)
        sums.setdefault(frozenset((a, b)), task.sum_row(a, b, NUM_DIGITS))
    rows = list(sums.values())
    return rows[:NUM_TRAIN_ROWS], rows[NUM_TRAIN_ROWS:]
