"""Policy losses, one idea per file: f(TokenInputs, *, parameters) -> LossTerms.

Keyword-only parameters are keys of `trainer.algorithm`. Terms exist for every token, also for those that the policy did
not write, so log-ratios are clamped before they are exponentiated: 0 * inf would be NaN. A trained token reaches the
clamp only after a divergence, and then gets no gradient.
"""
