"""Forecasts of memory and time: `plan` is the program, `before_run` what every run on GPUs prints and refuses."""

from skyrl_train.entrypoints.plan.plan import main

__all__ = ["main"]
