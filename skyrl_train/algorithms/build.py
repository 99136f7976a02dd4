"""Builds and checks the objective and the estimator of the keys of `trainer.algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from skyrl_train.algorithms.credit import reads_values
from skyrl_train.algorithms.distillation import kl_to_teacher, teacher_advantages, topk_forward, topk_reverse
from skyrl_train.algorithms.losses.value import clipped_value_loss
from skyrl_train.algorithms.objective import Bound, Objective, Term, kl_to_reference, negative_entropy, objective_loss
from skyrl_train.algorithms.preflight.calls import REDUCTION_KEYS, failures
from skyrl_train.algorithms.preflight.sample import sample_of_three
from skyrl_train.algorithms.selection import selection_of
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS
from skyrl_train.spelling import nearest


def bind(function: Callable[..., Any], values: Mapping[str, Any]) -> Bound:
    """Bind keyword-only parameters to the values of keys of the same name; a function with `**values` gets all.

    Raises: ValueError for missing keys.
    """
    keys = _keys(function)
    missing = [key.name for key in keys if key.default is key.empty and key.name not in values]
    if missing:
        meant = [near for name in missing if (near := nearest(name, values))]
        raise ValueError(
            f"{_place(function)} takes {', '.join(missing)}: no key has this name. "
            + (f"Did you mean {', '.join(meant)}? Otherwise set " if meant else "Set ")
            + ", ".join(f"trainer.algorithm.parameters.{name}=VALUE" for name in missing)
        )
    selection = selection_of(function)
    own = dict(values) if takes_all(function) else {key.name: values[key.name] for key in keys if key.name in values}
    return Bound(function, own, None if selection is None else bind(selection, values))


def build_objective(values: Mapping[str, Any], temperature: float) -> Objective:
    """The configured objective.

    Args: values: leaf name of every key of `trainer.algorithm` -> its value.
    Raises: ValueError for a function that cannot be imported or has a parameter without a key.
    """
    estimator, reduction = KL_ESTIMATORS.resolve(values["kl_estimator_type"]), values["loss_reduction"]
    terms = [Term("policy", bind(LOSSES.resolve(values["policy_loss_type"]), values), 1.0, reduction)]
    if values["use_entropy_loss"] and (values["entropy_loss_coef"] or values["target_entropy"] is not None):
        own = values["entropy_loss_reduction"] or reduction
        terms.append(Term("entropy", Bound(negative_entropy), values["entropy_loss_coef"], own))
    if values["use_kl_loss"] and values["kl_loss_coef"]:
        kl = bind(kl_to_reference, {**values, "estimator": estimator})
        own, is_corrected = values["kl_loss_reduction"] or reduction, values["use_corrected_kl"]
        terms.append(Term("kl", kl, values["kl_loss_coef"], own, is_corrected))
    if (distillation := _distillation_term(values)) is not None:
        own = values["distillation_reduction"] or reduction
        is_corrected = values["use_corrected_kl"] and values["distillation_type"] == "loss"
        terms.append(Term("distillation", distillation, values["distillation_coef"], own, is_corrected))
    has_shaping = values["distillation_type"] == "advantage"
    return Objective(
        terms=tuple(terms),
        temperature=temperature,
        shaping=bind(teacher_advantages, values) if has_shaping else None,
        corrections=tuple(bind(CORRECTIONS.resolve(name), values) for name in values["corrections"]),
        kl_estimator=estimator,
        prox_logp_method=values["prox_logp_method"],
    )


def build_critic_objective(values: Mapping[str, Any]) -> Objective:
    """The objective of the critic. Args: like `build_objective`."""
    reduction = values["value_loss_reduction"] or values["loss_reduction"]
    return Objective((Term("value", bind(clipped_value_loss, values), 1.0, reduction),), 1.0, name="critic")


def _distillation_term(values: Mapping[str, Any]) -> Bound | None:
    """The term of the objective of values["distillation_type"]; None if it has none."""
    kind = values["distillation_type"]
    if kind == "loss":
        return Bound(kl_to_teacher, {"estimator": KL_ESTIMATORS.resolve(values["distillation_kl_estimator"])})
    topk = {"topk_forward": topk_forward, "topk_reverse": topk_reverse}
    return Bound(topk[kind]) if kind in topk else None


def build_estimator(values: Mapping[str, Any]) -> Bound:
    """The configured advantage estimator. Args, Raises: like `build_objective`."""
    return bind(ADVANTAGES.resolve(values["advantage_estimator"]), values)


def algorithm_problems(
    values: Mapping[str, Any],
    parameters: Mapping[str, Any],
    places: Mapping[str, str],
    *,
    has_teacher: bool = False,
) -> Iterator[str]:
    """Problems of the keys, and those found by calling every function on a few tokens (`preflight/`).

    Args: values: as in `build_objective`; parameters: those of the user's own functions, also in values; places: leaf
        name -> key of `trainer.algorithm`; has_teacher: whether a teacher scores the samples.
    """
    try:
        objective, estimator = build_objective(values, 1.0), build_estimator(values)
        if reads_values(estimator.function):
            build_critic_objective(values)
        for key in REDUCTION_KEYS:
            if (name := values[key.rpartition(".")[2]]) is not None:
                REDUCTIONS.resolve(name)
    except ValueError as error:
        yield str(error)
        return
    functions = [*(term.loss for term in objective.terms), *objective.corrections, *objective.selections, estimator]
    yield from _hidden(functions, parameters, places)
    taken = {key.name for bound in functions for key in _keys(bound.function)}
    reads_all = any(takes_all(bound.function) for bound in functions)
    for name in () if reads_all else parameters.keys() - taken:
        close = nearest(name, taken)
        yield f"trainer.algorithm.parameters.{name} is set: no configured function has this parameter. " + (
            f"Did you mean {close}?" if close else f"Remove it, or use one of {', '.join(sorted(taken))}"
        )
    has_reference = values["kl_loss_coef"] and (values["use_kl_loss"] or values["use_kl_in_reward"])
    if "ref_logprobs" in objective.needs and not has_reference:
        yield (
            f"{_place(objective.terms[0].loss.function)} reads ref_logprobs: there is no reference model. Set "
            "trainer.algorithm.use_kl_loss=true and a kl_loss_coef above 0"
        )
    if unknown := [name for name in estimator.needs if name != "values"]:
        yield f"{_place(estimator.function)} needs {', '.join(unknown)}: estimators can only declare values. Remove it"
        return
    found = list(failures(objective, estimator, values))
    yield from found
    yield from _distillation_problems(values, objective, has_teacher=has_teacher)
    if not found and values["advantage_estimator"] == "zero" and needs_advantages(objective):
        yield (
            "trainer.algorithm.advantage_estimator is zero: without distillation or another term there is no gradient. "
            "Set trainer.algorithm.distillation.distillation_type=advantage, or choose another estimator"
        )


def _hidden(functions: Iterable[Bound], parameters: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    """Parameters of the user's own functions that would get the value of a key that happens to have their name."""
    for name in sorted(name for name in parameters.keys() & places if not isinstance(parameters[name], Mapping)):
        yield (
            f"trainer.algorithm.parameters.{name} is set: functions get the key trainer.algorithm.{places[name]} of "
            "that name. Set that key, or rename the parameter"
        )
    for bound in functions:
        is_own = not bound.function.__module__.startswith("skyrl_train.")
        for key in _keys(bound.function) if is_own else ():
            if key.default is not key.empty and "." in places.get(key.name, ""):
                yield (
                    f"{_place(bound.function)} has a default for {key.name}: it would get the value of "
                    f"trainer.algorithm.{places[key.name]} instead. Rename it, or remove the default to get that value"
                )


def _distillation_problems(values: Mapping[str, Any], objective: Objective, *, has_teacher: bool) -> Iterator[str]:
    key = "trainer.algorithm.distillation"
    kind, needed = values["distillation_type"], {"teacher_logprobs", "topk_logprobs"} & set(objective.needs)
    if needed and not has_teacher:
        source = f"{key}.distillation_type is {kind}" if kind else f"a function reads {min(needed)}"
        yield f"{source}: there is no teacher. Set trainer.teacher.model.path or .backend"
    if has_teacher and not needed:
        yield (
            "trainer.teacher is set: nothing in the objective reads it. Set "
            f"{key}.distillation_type=advantage, or remove trainer.teacher"
        )
    if kind == "loss" and values["distillation_kl_estimator"] == "k1":
        yield f"{key}.distillation_kl_estimator is k1: the expected gradient of this term is 0. Use k2 or k1+"
    if objective.shaping is not None and objective.terms[0].loss.selection is not None:
        yield (
            f"{key}.distillation_type is advantage: {objective.terms[0].loss.name} selects tokens by the advantages of "
            "the rewards alone. Use distillation_type=loss, or another policy_loss_type"
        )
    if kind is not None and values["distillation_coef"] == 0:
        yield f"{key}.distillation_coef is 0: the teacher would change nothing. Set distillation_type=null"


def needs_advantages(objective: Objective) -> bool:
    """Whether the gradient is 0 if all advantages are 0, tested with every term on a sample of three tokens."""
    for term in objective.terms:
        if term.coef == 0:
            continue
        tokens = objective.shaped(sample_of_three(objective.needs, objective.selections, has_advantages=False))
        terms = term.loss(tokens).terms
        (gradient,) = torch.autograd.grad(terms.sum(), tokens.logprobs, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            return False
    return True


def uses_rollout_logprobs(objective: Objective, log_weight: float = 12.0) -> bool:
    """Whether the policy's gradient depends on how likely the engine found the tokens, tested on a sample of three.

    Args: log_weight: log-ratio of engine and trainer that is compared with 0; masks ignore a small one.
    """
    gradients = []
    weights = {reduction: torch.full((3,), 1 / 3) for reduction in objective.reductions}
    for log_ratio in (0.0, log_weight):
        tokens = sample_of_three(objective.needs, objective.selections)
        rollout = tokens.old_logprobs + torch.tensor([log_ratio, 0.0, log_ratio])
        tokens = replace(tokens, signals={**tokens.signals, "rollout_logprobs": rollout})
        loss, _ = objective_loss(objective, tokens, weights)
        gradients.append(torch.autograd.grad(loss, tokens.logprobs)[0])
    return not torch.equal(*gradients)


def needs_logprobs(values: Mapping[str, Any]) -> bool:
    """Whether an update depends on how likely the engines found the tokens. Args: values: as in `build_objective`."""
    return values["prox_logp_method"] == "loglinear" or uses_rollout_logprobs(build_objective(values, 1.0))


def takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function gets the values of all keys (`**values`)."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _keys(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
