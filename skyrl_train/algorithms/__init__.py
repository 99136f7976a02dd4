"""Algorithms as pure functions: tensors and floats in, tensors out.

Each table (`ADVANTAGES`, `LOSSES`, `KL_ESTIMATORS`, `REDUCTIONS`) maps the name used in the configuration to a
function; a new algorithm is a function and a line in its table.
"""
