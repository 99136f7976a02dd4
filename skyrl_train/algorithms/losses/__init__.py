"""Policy losses, one idea per file: f(TokenInputs, *, parameters) -> LossTerms.

Keyword-only parameters are keys of `trainer.algorithm`. Terms exist for every token, also for those that the policy
did not write. So that 0 * inf cannot make a NaN, log-ratios are clamped wherever they are exponentiated: terms and
gradients are finite for all finite inputs. A trained token is that far off only after a divergence, and gets no
gradient then.
"""
