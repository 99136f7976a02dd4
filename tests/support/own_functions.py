"""Functions that a user might name in the configuration."""

from __future__ import annotations

from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs
from skyrl_train.algorithms.inputs import LossTerms, TokenInputs, needs
from skyrl_train.algorithms.metrics import Metric, Reduce


@needs("entropy")
def geometric(tokens: TokenInputs, *, strength: float) -> LossTerms:
    """A loss whose gradient goes through a mean over each sample, of the logprobs and of the entropy."""
    ratio = tokens.per_sample.mean(tokens.logprobs - tokens.old_logprobs).exp()
    spread = tokens.per_sample.sum(tokens.entropy)
    return LossTerms(-ratio * tokens.advantages + strength * spread, {"ratio": Metric(ratio, Reduce.SAMPLE_MEAN)})


@needs("entropy")
def of_entropy(inputs: CreditInputs) -> Tensor:
    """An estimator of a signal that estimators do not get."""
    return inputs.signals["entropy"]
