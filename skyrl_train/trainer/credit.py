"""Credit assignment, the weights that follow its measurements, and whether a step has anything to learn from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from skyrl_train.algorithms.build import build_estimator, needs_advantages
from skyrl_train.algorithms.controllers import adapted_entropy_coef, adapted_kl_coef
from skyrl_train.algorithms.credit import assign_credit, whitened
from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import credit_inputs, credit_metrics, sample_means
from skyrl_train.config.algorithm import AlgorithmConfig
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
        kl_coef; values [T]: those of the critic.
        """
        _require_finite("KL divergence from trainer.ref", "logprobs of the policy or the reference", kl)
        _require_finite("values of trainer.critic", "outputs of the critic", values)
        inputs = credit_inputs(experience, kl, kl_coef, values)
        result, returns = assign_credit(self._estimator.function, inputs, self._estimator.parameters)
        if self._normalizes:
            result = whitened(result.double(), inputs.loss_mask).float()
        metrics = credit_metrics(inputs, result, experience)
        if values is not None and returns is not None:
            metrics["critic/explained_variance"] = explained_variance(values, returns, inputs.loss_mask)
        return Credit(result, returns, metrics)


def _require_finite(what: str, cause: str, signal: Tensor | None) -> None:
    if signal is not None and (count := int((~signal.isfinite()).sum())):
        raise ValueError(f"{what}: not finite at {count} of {len(signal)} tokens, because {cause} are not")


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the masked tokens; 0 where all returns are equal."""
    if not mask.any():
        return 0.0
    returns, errors = returns[mask].double(), (returns - values)[mask].double()
    variance = float(returns.var(correction=0))
    return 1 - float(errors.var(correction=0)) / variance if variance else 0.0


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
        """Adapt to the entropy of an update, if its first mini-batch has a trained token. Returns: the weight that was
        used.
        """
        if not self._is_entropy_adaptive:
            return {}
        used, control = self._entropy, self._entropy_control
        assert control.target_entropy is not None
        if (entropy := metrics.get("policy/policy_entropy")) is not None:
            goal, delta = control.target_entropy, control.delta
            self._entropy = adapted_entropy_coef(used, entropy, target_entropy=goal, delta=delta)
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


class LearningSignal:
    """Detects steps whose gradient would be 0: no token is trained, or all advantages are 0 and nothing else is in the
    objective.

    Such a step must not be trained: Adam's momentum and weight decay would move the weights all the same.
    """

    def __init__(self, objective: Objective, *, has_other_terms: bool, needs_tokens: bool = True) -> None:
        """Args: has_other_terms: whether a KL penalty in the reward, a critic or a load-balancing loss gives a gradient
        too; needs_tokens: False if there is one, or an update is wanted, also where no token is trained.
        """
        self._objective, self._has_other_terms = objective, has_other_terms
        self._needs_tokens, self._num_missing = needs_tokens, 0

    def is_in(self, metrics: Metrics, objective: Objective | None = None, *, has_tokens: bool = True) -> bool:
        """Whether to update. Logs the first step without signal, the second, the fourth, and so on.

        Args: metrics: those of `Credit`; objective: that of the step, whose adaptive weights may have become 0, by
            default the configured one; has_tokens: whether any token is trained.
        """
        has_none = self._needs_tokens and not has_tokens
        has_equal = not self._has_other_terms and metrics["loss/avg_raw_advantages_abs"] == 0
        is_missing = has_none or (has_equal and needs_advantages(objective or self._objective))
        self._num_missing += is_missing
        if is_missing and self._num_missing.bit_count() == 1:
            log.warning(
                "the step has no signal: %s (%.0f %% of the groups have equal "
                "rewards), so it makes no update, no policy version and no weight sync. If this happens often, check "
                "the rewards and the difficulty of the prompts. Steps without signal so far: %d. Their "
                "policy/num_optimizer_steps is 0; this is logged again when there are twice as many",
                "all its samples are masked" if has_none else "the advantages of all trained tokens are 0",
                100 * metrics["reward/zero_variance_share"],
                self._num_missing,
            )
        return not is_missing
