"""Data and model of `+experiment=opsd`: the quickstart's sums, and a tiny model that can read an answer before them."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.tasks import quickstart
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import is_missing, sums, warm_start, write_missing

MODEL = Path("quickstart/reads_hints")


def prepare(config: Config) -> None:
    """Create data and model in the current folder if they do not exist.

    The model is trained on `07+48=` and on `55 07+48=` until it solves a third of the former; it then copies nearly all
    answers of the latter.
    """
    train, validation = task.addition_rows(seed=0)
    write_missing(config, {quickstart.TRAIN_DATA: train, quickstart.VALIDATION_DATA: validation})
    if is_missing(config, MODEL):
        hinted = [(f"{answer} {prompt}", answer) for prompt, answer in sums(train)]
        shape = task.model_config()
        warm_start(MODEL, config.trainer.seed, shape, sums(train) + hinted, sums(validation))
