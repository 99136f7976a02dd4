"""From the rewards of a step's samples to an advantage for every token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyrl_train.algorithms.build import build_estimator
from skyrl_train.algorithms.credit import advantages
from skyrl_train.batching.build import credit_inputs, credit_metrics
from skyrl_train.config.rl import AlgorithmConfig
from skyrl_train.types import ExperienceBatch, Metrics


@dataclass(frozen=True, slots=True)
class Credit:
    """What the estimator gave."""

    advantages: Tensor
    """[T] float32"""
    metrics: Metrics


class CreditAssignment:
    """The configured estimator, with the KL penalty of the reward where there is one."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._estimator = build_estimator(algorithm.values)
        self._kl_coef = algorithm.kl_loss_coef

    def __call__(self, experience: ExperienceBatch, kl: Tensor | None = None) -> Credit:
        """Args: kl [T]: estimated KL divergence from the reference, taken off the rewards."""
        inputs = credit_inputs(experience, kl, self._kl_coef)
        result = advantages(self._estimator.function, inputs, self._estimator.parameters)
        return Credit(result, credit_metrics(inputs, result))
