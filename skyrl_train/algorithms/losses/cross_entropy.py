"""The loss of supervised fine-tuning."""

from __future__ import annotations

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs


def cross_entropy(tokens: TokenInputs) -> LossTerms:
    """-log p of every trained token."""
    return LossTerms(-tokens.logprobs)
