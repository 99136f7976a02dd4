"""Calls of the configured functions before a run: `sample.py` has their inputs, `calls.py` judges what they return."""
