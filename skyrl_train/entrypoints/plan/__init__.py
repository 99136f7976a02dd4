"""Forecasts of memory and time on the command line; what every run on GPUs prints is in `forecast/fit.py`."""

from skyrl_train.entrypoints.plan.plan import main

__all__ = ["main"]
