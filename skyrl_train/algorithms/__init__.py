"""Algorithms as pure functions of tensors; imports torch alone.

`tables.py` maps the names of the configuration to functions, `inputs.py` has the inputs of losses and corrections,
`credit.py` those of estimators, `objective.py` composes them. `module:attribute` names a user's function, which
`preflight/` calls before a run.
"""
