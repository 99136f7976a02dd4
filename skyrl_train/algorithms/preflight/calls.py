"""Calls of a run's functions on small inputs, so that an error names the key, the function, its line and the remedy.

The run itself does not check what functions return: its numbers would broadcast, and train something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import assign_credit, reads_values
from skyrl_train.algorithms.inputs import Correction, LossTerms, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.objective import Bound, Objective, place
from skyrl_train.algorithms.preflight.sample import sample_of_three, two_samples_of_two
from skyrl_train.algorithms.reductions import MaxLengths, weighted_sum
from skyrl_train.algorithms.tables import REDUCTIONS

REDUCTION_KEYS = (
    *("loss_reduction", "kl_loss_reduction", "entropy_loss_reduction", "value_loss_reduction"),
    "distillation.distillation_reduction",
)
MASK = torch.tensor([True, True, False])


class WrongResult(Exception):
    """A function returned something else than it must."""

    def __init__(self, given: str, remedy: str = "") -> None:
        """Args: given: what it returned; remedy: a sentence, by default what it must return."""
        super().__init__(given)
        self.given, self.remedy = given, remedy


@dataclass(frozen=True, slots=True)
class Contract:
    """What a function gets and must return, for errors."""

    inputs: str
    result: str


LOSS = Contract("TokenInputs", "LossTerms(terms of shape [P], metrics)")
CORRECTION = Contract("TokenInputs", "Correction(factor of shape [P], metrics)")
KL = Contract("logprobs of shape [P], ref_logprobs of shape [P]", "a tensor of shape [P]")
REDUCTION = Contract("num_tokens of shape [B], group_ids of shape [B], MaxLengths", "divisors of shape [B]")
OF_TOKENS = Contract("CreditInputs", "advantages of shape [T]")
OF_SAMPLES = Contract("rewards of shape [B], group_ids of shape [B]", "advantages of shape [B]")
WITH_VALUES = Contract("CreditInputs", "AdvantagesAndReturns, both of shape [T]")


def failures(objective: Objective, estimator: Bound, values: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the objective's functions and the estimator. Args: values: as in `build_objective`."""
    terms = {term.name: term.loss for term in objective.terms}
    of_loss, of_correction = partial(_call_loss, objective), partial(_call_correction, objective)
    yield from _failures(f"policy_loss_type is {values['policy_loss_type']}", terms["policy"], LOSS, of_loss)
    for name, correction in zip(values["corrections"], objective.corrections, strict=True):
        yield from _failures(f"corrections has {name}", correction, CORRECTION, of_correction)
    kl, of_kl = Bound(objective.kl_estimator), partial(_call_kl, has_gradient="kl" in terms)
    yield from _failures(f"kl_estimator_type is {values['kl_estimator_type']}", kl, KL, of_kl)
    if values["distillation_type"] == "loss":
        named = f"distillation.distillation_kl_estimator is {values['distillation_kl_estimator']}"
        to_teacher = Bound(terms["distillation"].parameters["estimator"])
        yield from _failures(named, to_teacher, KL, partial(_call_kl, has_gradient=True))
    is_per_sample = getattr(estimator.function, "is_per_sample", False)
    contract = WITH_VALUES if reads_values(estimator.function) else OF_SAMPLES if is_per_sample else OF_TOKENS
    named = f"advantage_estimator is {values['advantage_estimator']}"
    yield from _failures(named, estimator, contract, _call_estimator)
    for key in REDUCTION_KEYS:
        if (name := values[key.rpartition(".")[2]]) is not None:
            yield from _failures(f"{key} is {name}", Bound(REDUCTIONS.resolve(name)), REDUCTION, _call_reduction)


def _failures(named: str, bound: Bound, contract: Contract, call: Callable[[Bound], object]) -> Iterator[str]:
    """Args: named: key below `trainer.algorithm` and its value; call: calls the function and judges its result."""
    try:
        call(bound)
    except WrongResult as error:
        remedy = error.remedy or f"It must return {contract.result}"
        yield f"trainer.algorithm.{named}: it returned {error.given}{place(bound.function)}. {remedy}"
    except Exception as error:
        arguments = ", ".join([contract.inputs, *_own_arguments(bound)])
        yield (
            f"trainer.algorithm.{named}: {type(error).__name__}: {error}{place(bound.function, error)}. It is called "
            f"as {bound.name}({arguments}) and must return {contract.result}"
        )


def _own_arguments(bound: Bound) -> list[str]:
    """The parameters that the function names, not all values of `**values`."""
    named = inspect.signature(bound.function).parameters
    return [f"{name}={value!r}" for name, value in bound.parameters.items() if name in named]


def _call_loss(objective: Objective, loss: Bound) -> None:
    tokens = _tokens(objective, loss)
    result = loss(tokens)
    if not isinstance(result, LossTerms):
        raise WrongResult(_kind(result))
    _require_per_token(result.terms, "terms", "Return one term per token, [P], not their mean or sum")
    _require_gradient(result.terms, tokens.logprobs)
    _require_metrics(result.metrics)


def _call_correction(objective: Objective, correction: Bound) -> None:
    result = correction(_tokens(objective, correction))
    if not isinstance(result, Correction):
        raise WrongResult(_kind(result))
    _require_per_token(result.factor, "a factor", "Return one factor per token, [P]")
    _require_metrics(result.metrics)


def _call_kl(estimator: Bound, *, has_gradient: bool) -> None:
    tokens = sample_of_three(("ref_logprobs",), ())
    result = estimator(tokens.logprobs, tokens.ref_logprobs)
    _require_per_token(result, "values", "Return one value per token, [P], not their mean or sum")
    if has_gradient:
        _require_gradient(result, tokens.logprobs)


def _call_estimator(estimator: Bound) -> None:
    inputs = two_samples_of_two(estimator.parameters.get("gdpo_reward_weights", ()))
    assign_credit(estimator.function, inputs, estimator.parameters)


def _call_reduction(reduction: Bound) -> None:
    num_tokens = torch.tensor([3, 0, 2])
    result = reduction(num_tokens, torch.tensor([0, 0, 1]), MaxLengths(response=4, conversation=8))
    if not isinstance(result, Tensor) or result.shape != num_tokens.shape:
        remedy = "Return one divisor per sample, [B]"
        raise WrongResult(f"divisors {_shape(result)} for {len(num_tokens)} samples", remedy)
    trained = result[num_tokens > 0]
    if not bool((torch.isfinite(trained) & (trained >= 1)).all()):
        raise WrongResult(f"divisors {trained.tolist()} for samples with tokens", "They must be finite, and at least 1")


def _tokens(objective: Objective, bound: Bound) -> TokenInputs:
    """Three tokens, of which the policy wrote two."""
    selections = () if bound.selection is None else (bound.selection,)
    tokens, mask = objective.shaped(sample_of_three(objective.needs, selections)), MASK.clone()
    return replace(tokens, loss_mask=mask, per_sample=replace(tokens.per_sample, mask=mask))


def _kind(result: object) -> str:
    return f"a {type(result).__name__}" if result is not None else "None"


def _shape(result: object) -> str:
    return f"of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"of type {type(result).__name__}"


def _is_per_token(result: object) -> bool:
    return isinstance(result, Tensor) and result.shape == MASK.shape


def _require_per_token(result: Tensor, what: str, remedy: str) -> None:
    if not _is_per_token(result):
        raise WrongResult(f"{what} {_shape(result)} for {len(MASK)} tokens", remedy)
    if not bool(torch.isfinite(result[MASK]).all()):
        raise WrongResult(f"{what} {result[MASK].tolist()} for trained tokens", "They must be finite")


def _require_gradient(terms: Tensor, logprobs: Tensor) -> None:
    loss = weighted_sum(terms, MASK.float())
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True) if loss.requires_grad else (None,)
    if gradient is None:
        remedy = "Compute them from the policy's logprobs, without detach() or item()"
        raise WrongResult("terms without a gradient", remedy)
    if not bool(torch.isfinite(gradient).all()):
        raise WrongResult(f"terms whose gradient is {gradient.tolist()} for {len(MASK)} tokens", "It must be finite")


def _require_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise WrongResult(f"metrics of type {type(metrics).__name__}", "Return a dict of name -> Metric")
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or not isinstance(metric.reduce, Reduce):
            given = f"Metric(..., {metric.reduce!r})" if isinstance(metric, Metric) else _kind(metric)
            allowed = ", ".join(reduce.name for reduce in Reduce)
            remedy = f"Return Metric(values of shape [P], Reduce.X), X one of {allowed}"
            raise WrongResult(f"the metric {name} as {given}", remedy)
        _require_values(name, metric)


def _require_values(name: str, metric: Metric) -> None:
    values, mask, is_sum = metric.values, metric.mask, metric.reduce is Reduce.STEP_MEAN
    if not (isinstance(values, Tensor) and values.numel() == 1 if is_sum else _is_per_token(values)):
        size = "one number" if is_sum else "one number per token, [P]"
        given = f"the metric {name} with values {_shape(values)} for {len(MASK)} tokens"
        raise WrongResult(given, f"With {metric.reduce} they must be a tensor of {size}")
    if mask is not None and not (_is_per_token(mask) and mask.dtype == torch.bool):
        raise WrongResult(f"the metric {name} with a mask {_shape(mask)}", "It must be a bool tensor of shape [P]")
