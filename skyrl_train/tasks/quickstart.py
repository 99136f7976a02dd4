"""Data and model of `+experiment=quickstart`: sums, and a tiny model that solves a third of them when sampled."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import is_missing, sums, warm_start, write_missing

MODEL = Path("quickstart/model")
TRAIN_DATA, VALIDATION_DATA = Path("quickstart/train.jsonl"), Path("quickstart/validation.jsonl")


def prepare(config: Config) -> None:
    train, validation = task.addition_rows(seed=0)
    write_missing(config, {TRAIN_DATA: train, VALIDATION_DATA: validation})
    if is_missing(config, MODEL):
        warm_start(MODEL, config.trainer.seed, task.model_config(), sums(train), sums(validation))
