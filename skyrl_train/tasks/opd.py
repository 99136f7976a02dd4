"""Data and models of `+experiment=opd`: the quickstart's sums and student, and a teacher that solves nine in ten."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.tasks import quickstart
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import sums, warm_start

TEACHER = Path("quickstart/teacher")
TEACHER_ACCURACY = 0.9


def prepare(config: Config) -> None:
    """Create the data, the student and the teacher in the current folder if they do not exist."""
    quickstart.prepare(config)
    if config.trainer.teacher.model.path == str(TEACHER) and not TEACHER.exists():
        train, validation = task.addition_rows(seed=0)
        shape = task.model_config()
        warm_start(TEACHER, config.trainer.seed, shape, sums(train), sums(validation), target=TEACHER_ACCURACY)
