"""The objective of a policy update: a sum of terms, each weighted over the tokens of the whole mini-batch."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs, needs
from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses.cross_entropy import cross_entropy
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.ratios import clamped, ratio
from skyrl_train.algorithms.reductions import weighted_sum
from skyrl_train.algorithms.staleness import Buckets, by_staleness, loglinear


@dataclass(frozen=True)
class Bound:
    """A function with the values of its keyword-only parameters."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    selection: Bound | None = None
    """Selection of the mini-batch's tokens that the function reads (selection.py)."""

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs, **self.parameters)

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def needs(self) -> tuple[str, ...]:
        """Optional signals (entropy, ref_logprobs) that the function or its parameters declare with `needs`."""
        own: tuple[str, ...] = getattr(self.function, "needs", ())
        inner = [value.needs for value in self.parameters.values() if isinstance(value, Bound)]
        return tuple(dict.fromkeys([*own, *(name for names in inner for name in names)]))


@dataclass(frozen=True, slots=True)
class Term:
    """coef * sum(loss_weights * terms)"""

    name: str
    """Logged as `OBJECTIVE/NAME_loss`, without the coefficient."""
    loss: Bound
    """f(TokenInputs) -> LossTerms"""
    coef: float = 1.0
    reduction: str = "token_mean"
    """Reduction of its weights, a name of `REDUCTIONS`."""
    is_corrected: bool = False
    """Whether corrections multiply the term; they always multiply the policy's term."""


@dataclass(frozen=True)
class Objective:
    """The sum of its terms."""

    terms: tuple[Term, ...]
    """The first is the policy's, to which corrections apply."""
    temperature: float
    """Divides the logits, as the engines' sampling does. Truncation (top-p, top-k, min-p) is refused in training."""
    shaping: Bound | None = None
    """f(TokenInputs) -> [P]: the advantages that the policy term and the corrections read instead of the given ones."""
    corrections: tuple[Bound, ...] = ()
    """f(TokenInputs) -> Correction; their product multiplies the policy term and all terms with `is_corrected`."""
    kl_estimator: Callable[[Tensor, Tensor], Tensor] = k3
    """Estimator of a KL penalty in the reward, which ranks compute together with the old logprobs."""
    prox_logp_method: str = "recompute"
    """Source of the old logprobs of an update with several optimizer steps: "recompute", a pass before it, or
    "loglinear" (staleness.py)."""
    num_steps: int = 0
    """Number of optimizer steps of the update before this pass."""
    buckets: Buckets | None = None
    """Staleness buckets by which metrics are split; None if no sample is stale."""
    name: str = "policy"
    """First part of the names of its metrics."""

    @property
    def reductions(self) -> tuple[str, ...]:
        """Distinct names of reductions."""
        return tuple(dict.fromkeys(term.reduction for term in self.terms))

    @property
    def needs(self) -> tuple[str, ...]:
        """Signals that any function declared."""
        functions = [term.loss for term in self.terms] + list(self.corrections)
        functions += [] if self.shaping is None else [self.shaping]
        return tuple(dict.fromkeys(name for function in functions for name in function.needs))

    @property
    def selections(self) -> tuple[Bound, ...]:
        """Selections that a loss or a correction reads."""
        functions = [*(term.loss for term in self.terms), *self.corrections]
        found = (function.selection for function in functions)
        return tuple(selection for selection in found if selection is not None)

    @property
    def selection_needs(self) -> tuple[str, ...]:
        """Signals that the selections read."""
        return tuple(dict.fromkeys(name for selection in self.selections for name in selection.needs))

    @property
    def approximates(self) -> bool:
        """Whether the old logprobs of this pass are not those of a forward pass."""
        return self.prox_logp_method == "loglinear" and self.num_steps > 0

    def after(self, num_steps: int) -> Objective:
        """The objective of the pass after `num_steps` optimizer steps of an update."""
        return self if self.prox_logp_method == "recompute" else replace(self, num_steps=num_steps)

    def old_logprobs(self, logprobs: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        """Old logprobs [P] if no pass computed them. Args: logprobs [P], current ones, without gradient."""
        if not self.approximates:  # the first step of an update: the current policy is the old one
            return logprobs
        return loglinear(logprobs, signals["rollout_logprobs"], signals["staleness"], self.num_steps)

    def shaped(self, tokens: TokenInputs) -> TokenInputs:
        """The inputs with the advantages that `shaping` makes of them."""
        if self.shaping is None:
            return tokens
        return replace(tokens, signals={**tokens.signals, "advantages": self.shaping(tokens).detach()})


def cross_entropy_objective() -> Objective:
    """Supervised fine-tuning: the mean of -log p over all trained tokens."""
    return Objective((Term("policy", Bound(cross_entropy)),), 1.0)


@needs("ref_logprobs")
def kl_to_reference(
    tokens: TokenInputs, *, estimator: Callable[[Tensor, Tensor], Tensor], use_unbiased_kl: bool
) -> LossTerms:
    """Per-token KL divergence from the policy to the reference.

    Args: use_unbiased_kl: multiply the estimate by the ratio, with gradient through both, so that it stays unbiased
        where the policy has moved since the step began (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    """
    kl = estimator(tokens.logprobs, tokens.ref_logprobs)
    metrics = {"policy_kl": Metric(kl, Reduce.TOKEN_MEAN), "policy_kl_max": Metric(kl, Reduce.MAX)}
    return LossTerms(ratio(tokens) * kl if use_unbiased_kl else kl, metrics)


@needs("entropy")
def negative_entropy(tokens: TokenInputs) -> LossTerms:
    """The entropy bonus as a loss."""
    return LossTerms(-tokens.entropy)


# Logged without the prefix loss_metrics/, under the names of skyrl_train 0.4.
OWN_METRICS = frozenset({"policy_kl", "policy_kl_max"})
KEYS = {
    "policy": "policy_loss_type",
    "kl": "kl_estimator_type",
    "distillation": "distillation.distillation_kl_estimator",
    "correction": "corrections",
}
"""Name of a term -> key below `trainer.algorithm` that names its function."""


def objective_loss(
    objective: Objective, tokens: TokenInputs, weights: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Metric]]:
    """Contribution of a micro-batch to the loss, with gradient, and its metrics under their logged names.

    Args: weights: name of each reduction -> [P] float32, each token's weight in the whole mini-batch.
    """
    tokens = objective.shaped(_of_trained(tokens))
    metrics: dict[str, Metric] = {}
    factor = None
    for correction in objective.corrections:
        multiplier, own = _result("correction", correction, tokens)
        factor = multiplier.detach() if factor is None else factor * multiplier.detach()
        metrics |= {f"{objective.name}/correction/{correction.name}/{name}": metric for name, metric in own.items()}
    loss = torch.zeros((), dtype=torch.float32, device=tokens.logprobs.device)
    for index, term in enumerate(objective.terms):
        terms, own = _result(term.name, term.loss, tokens)
        if factor is not None and (index == 0 or term.is_corrected):
            terms = terms * factor
        value = weighted_sum(terms, weights[term.reduction])
        loss = loss + term.coef * value
        metrics[f"{objective.name}/{term.name}_loss"] = Metric(value, Reduce.STEP_MEAN)
        metrics |= {
            f"{objective.name}/{name}" if name in OWN_METRICS else f"{objective.name}/loss_metrics/{name}": metric
            for name, metric in own.items()
        }
    metrics |= {f"{objective.name}/final_loss": Metric(loss, Reduce.STEP_MEAN)} | _movement(tokens)
    if not objective.approximates:  # else the old logprobs are made of the engine's, and do not measure anything
        metrics |= _mismatch(tokens)
    return loss, metrics | ({} if objective.buckets is None else by_staleness(metrics, tokens, objective.buckets))


def _of_trained(tokens: TokenInputs) -> TokenInputs:
    """The inputs with gradients of trained tokens alone: 0 elsewhere, even where a derivative is not finite."""
    kept = tokens.loss_mask

    def trained(values: Tensor) -> Tensor:
        mask = kept if values.dim() == 1 else kept[:, None]
        return torch.where(mask, values, values.detach()) if values.requires_grad else values

    signals = {name: trained(values) for name, values in tokens.signals.items()}
    return replace(tokens, logprobs=trained(tokens.logprobs), signals=signals)


def _result(name: str, bound: Bound, tokens: TokenInputs) -> Any:
    """Call a function. An error of a user's own one is raised as RuntimeError with its key, name and line."""
    try:
        return bound(tokens)
    except torch.OutOfMemoryError:  # explained by the process that has it
        raise
    except Exception as error:
        functions = [bound.function, *filter(callable, bound.parameters.values())]
        own = [function for function in functions if not function.__module__.startswith("skyrl_train.")]
        if name not in KEYS or not own:
            raise
        made = f"{own[0].__module__}:{getattr(own[0], '__qualname__', type(own[0]).__name__)}"
        message = f"{type(error).__name__}: {error}{place(own[0], error)}"
        raise RuntimeError(f"trainer.algorithm.{KEYS[name]}: {made} raised {message}") from error


def place(function: Callable[..., Any], error: Exception | None = None) -> str:
    """` (FILE:LINE)` in the function's module: where it raised the error, or where it is defined; "" if unknown."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    lines = [code.co_firstlineno] if code is not None and code.co_filename == file else []
    lines += [
        frame.lineno
        for frame in traceback.extract_tb(None if error is None else error.__traceback__)
        if frame.filename == file and frame.lineno is not None
    ]
    return f" ({Path(file).name}:{lines[-1]})" if file is not None and lines else ""


def _movement(tokens: TokenInputs) -> dict[str, Metric]:
    """Metrics of the change of the policy within the step, and of its distance to the teacher before it."""
    signals = tokens.signals
    metrics = {}
    if "old_logprobs" in signals:
        moved = signals["old_logprobs"] - tokens.logprobs.detach()
        metrics["policy/approx_kl"] = Metric(moved, Reduce.TOKEN_MEAN)
        metrics["policy/ratio_max"] = Metric(clamped(-moved).exp(), Reduce.MAX)
    if "old_logprobs" in signals and "teacher_logprobs" in signals:
        difference = signals["old_logprobs"] - signals["teacher_logprobs"]
        metrics["policy/teacher_kl"] = Metric(difference, Reduce.TOKEN_MEAN)
        metrics["policy/teacher_kl_max"] = Metric(difference, Reduce.MAX)
    return metrics


def _mismatch(tokens: TokenInputs) -> dict[str, Metric]:
    """Difference between engine and trainer before the step."""
    signals = tokens.signals
    metrics = {}
    if "old_logprobs" in signals and "rollout_logprobs" in signals:
        log_weight = signals["old_logprobs"] - signals["rollout_logprobs"]
        for reduce, name in ((Reduce.TOKEN_MEAN, "mean"), (Reduce.TOKEN_STD, "std"), (Reduce.MAX, "max")):
            metrics[f"policy/rollout_train_logprobs_abs_diff_{name}"] = Metric(log_weight.abs(), reduce)
        k3_values = k3(signals["rollout_logprobs"], signals["old_logprobs"])
        metrics["policy/rollout_train_kl"] = Metric(k3_values, Reduce.TOKEN_MEAN)
        metrics["policy/rollout_train_kl_k1"] = Metric(-log_weight, Reduce.TOKEN_MEAN)
        weight = clamped(log_weight).exp()
        metrics["policy/rollout_train_ratio_mean"] = Metric(weight, Reduce.TOKEN_MEAN)
        metrics["policy/rollout_train_effective_share"] = Metric(weight, Reduce.TOKEN_EFFECTIVE_SHARE)
    return metrics
