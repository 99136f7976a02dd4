"""Credit assignment: an advantage for every token, and whether a step has anything to learn from."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from skyrl_train.algorithms.build import build_estimator, needs_advantages
from skyrl_train.algorithms.credit import assign_credit, whitened
from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import credit_inputs, credit_metrics
from skyrl_train.config.rl import AlgorithmConfig
from skyrl_train.types import ExperienceBatch, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credit:
    """Result of the estimator for one step."""

    advantages: Tensor
    """[T] float32"""
    returns: Tensor | None
    """[T] float32, with a critic."""
    metrics: Metrics


class CreditAssignment:
    """The configured estimator, with the KL penalty of the reward where there is one."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._estimator = build_estimator(algorithm.values)
        self._normalizes = algorithm.advantage_batch_normalize

    def __call__(
        self,
        experience: ExperienceBatch,
        kl: Tensor | None = None,
        values: Tensor | None = None,
        *,
        kl_coef: float = 0.0,
    ) -> Credit:
        """Args: kl [T]: estimated KL divergence from the reference, subtracted from the rewards with the weight
        kl_coef; values [T]: those of the critic."""
        inputs = credit_inputs(experience, kl, kl_coef, values)
        result, returns = assign_credit(self._estimator.function, inputs, self._estimator.parameters)
        if self._normalizes:
            result = whitened(result.double(), inputs.loss_mask).float()
        metrics = credit_metrics(inputs, result)
        if values is not None and returns is not None:
            metrics["critic/explained_variance"] = explained_variance(values, returns, inputs.loss_mask)
        return Credit(result, returns, metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 where all returns are equal."""
    if not mask.any():
        return 0.0
    returns, errors = returns[mask].double(), (returns - values)[mask].double()
    variance = float(returns.var(correction=0))
    return 1 - float(errors.var(correction=0)) / variance if variance else 0.0


class LearningSignal:
    """Detects steps whose gradient would be 0: all advantages are 0, and nothing else is in the objective.

    Such a step must not be trained: Adam's momentum and weight decay would move the weights all the same.
    """

    def __init__(self, objective: Objective, *, has_other_terms: bool) -> None:
        """Args: has_other_terms: whether a KL penalty in the reward or a load-balancing loss gives a gradient too."""
        self._is_always_there = has_other_terms or not needs_advantages(objective)
        self._was_missing = False

    def is_in(self, metrics: Metrics) -> bool:
        """Whether to update. Logs the first of several steps in a row without signal.

        Args: metrics: those of `Credit`.
        """
        is_missing = not self._is_always_there and metrics["loss/avg_raw_advantages_abs"] == 0
        if is_missing and not self._was_missing:
            log.warning(
                "the step has no signal: the advantages of all trained tokens are 0 (%.0f %% of the groups have equal "
                "rewards), so it makes no update, no policy version and no weight sync. If this happens often, check "
                "the rewards and the difficulty of the prompts. Following steps without signal are not logged: their "
                "policy/num_optimizer_steps is 0",
                100 * metrics["reward/zero_variance_share"],
            )
        self._was_missing = is_missing
        return not is_missing
