"""Advantage estimators.

f(CreditInputs, *, parameters) -> [T] float32; the decorator `per_sample` lifts f(rewards [B], group_ids [B], *,
parameters) -> [B]. Keyword-only parameters are keys of `trainer.algorithm`. Sums are in float64: for equal
float32 rewards the mean is then exactly that reward, and their advantages are exactly 0.
"""
