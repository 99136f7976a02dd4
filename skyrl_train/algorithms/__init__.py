"""Algorithms as pure functions of tensors; torch is all they know.

`tables.py` maps each name of the configuration to its function, `inputs.py` is what a loss or a correction reads of a
token, `credit.py` what an estimator reads, `objective.py` composes them. A name `module:attribute` is a user's own.
"""
