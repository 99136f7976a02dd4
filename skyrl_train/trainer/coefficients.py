"""Weights that change between steps: of the KL penalty in the reward, and of the entropy term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from skyrl_train.algorithms.controllers import adapted_entropy_coef, adapted_kl_coef
from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import sample_means
from skyrl_train.config.rl import AlgorithmConfig
from skyrl_train.types import ExperienceBatch, Metrics


class Coefficients:
    """`kl_loss_coef` and `entropy_loss_coef` with their controllers, if the configuration has any."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.kl, self._entropy = algorithm.kl_loss_coef, algorithm.entropy_loss_coef
        self._kl_control, self._entropy_control = algorithm.kl_ctrl, algorithm.adaptive_entropy
        self._is_kl_adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
        self._is_entropy_adaptive = algorithm.has_adaptive_entropy

    def after_penalty(self, experience: ExperienceBatch, kl: Tensor) -> Metrics:
        """Adapt to a step's KL divergence kl [T]. Returns: the divergence, and the weight that was used."""
        means = sample_means(experience, kl)
        mean = float(means.mean()) if len(means) else 0.0
        metrics = {"loss/avg_kl": mean, "loss/kl_loss_coef": self.kl}
        if self._is_kl_adaptive:
            control = self._kl_control
            self.kl = adapted_kl_coef(
                self.kl, mean, kl_target=control.kl_target, horizon=control.horizon, num_samples=len(means)
            )
        return metrics

    def objective(self, objective: Objective) -> Objective | None:
        """The objective with the present weight of the entropy; None if that does not change."""
        if not self._is_entropy_adaptive:
            return None
        terms = (replace(term, coef=self._entropy) if term.name == "entropy" else term for term in objective.terms)
        return replace(objective, terms=tuple(terms))

    def after_update(self, metrics: Metrics) -> Metrics:
        """Adapt to the entropy of an update. Returns: the weight that was used."""
        if not self._is_entropy_adaptive:
            return {}
        used, control = self._entropy, self._entropy_control
        assert control.target_entropy is not None
        entropy = metrics["policy/policy_entropy"]
        self._entropy = adapted_entropy_coef(used, entropy, target_entropy=control.target_entropy, delta=control.delta)
        return {"policy/entropy_loss_coef": used}

    @property
    def state(self) -> dict[str, float]:
        """Adapted weights, for checkpoints."""
        adapted = {"kl": self.kl} if self._is_kl_adaptive else {}
        return adapted | ({"entropy": self._entropy} if self._is_entropy_adaptive else {})

    def resume(self, state: Mapping[str, float]) -> None:
        """Continue with saved weights; those without a controller stay as configured."""
        self.kl = state.get("kl", self.kl) if self._is_kl_adaptive else self.kl
        self._entropy = state.get("entropy", self._entropy) if self._is_entropy_adaptive else self._entropy
