"""Functions are called before a run: what they must not return, and errors, name the key, the function and the line."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.algorithms.build import algorithm_problems, build_objective
from skyrl_train.algorithms.inputs import Correction, PerSample, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.objective import Bound, objective_loss
from skyrl_train.algorithms.preflight.sample import sample_of_three
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS
from skyrl_train.config import load_config
from skyrl_train.config.algorithm import PLACES
from skyrl_train.megatron.passes.metrics import MicroBatchSums

MODULE = """
import torch
from skyrl_train.algorithms.credit import per_sample
from skyrl_train.algorithms.inputs import Correction, LossTerms, needs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.selection import selects

def terms(tokens): return -tokens.logprobs * tokens.advantages

def right(tokens): return LossTerms(terms(tokens), {"sum": Metric(terms(tokens).sum(), Reduce.STEP_MEAN)})
class Object:
    def __call__(self, tokens, *, eps_clip_low, **values): return LossTerms(terms(tokens) * eps_clip_low)
an_object = Object()
def factor(tokens): return Correction(tokens.loss_mask, {"x": Metric(tokens.advantages, Reduce.MAX, tokens.loss_mask)})
def kl(logprobs, ref): return logprobs - ref
@per_sample
def per_group(rewards, group_ids): return rewards

def mean(tokens): return LossTerms(terms(tokens).mean())
def first(tokens): return LossTerms(terms(tokens)[:1])
def twice(tokens): return LossTerms(torch.stack([terms(tokens)] * 2))
def trained(tokens): return LossTerms(terms(tokens)[tokens.loss_mask])
def number(tokens): return LossTerms(1.0)
def tensor(tokens): return terms(tokens)
def none(tokens): pass
def detached(tokens): return LossTerms(terms(tokens).detach())
def nan(tokens): return LossTerms(terms(tokens) * float("nan"))
def steep(tokens): return LossTerms((tokens.logprobs + 0.5).sqrt().nan_to_num())
def no_arguments(): pass
def misspelt(tokens):
    return LossTerms(
        tokens.logprob)
def scaled(tokens, *, scale): return LossTerms(-scale * terms(tokens))
@selects(lambda batch: batch.advantages)
def selecting(tokens): return right(tokens)

def metrics(what): return lambda tokens: LossTerms(terms(tokens), what)
plain = metrics({"x": 1.0})
listed = metrics([1.0])
scalar_metric = metrics({"x": Metric(torch.ones(()), Reduce.MAX)})
float_metric = metrics({"x": Metric(1.0, Reduce.STEP_MEAN)})
named_reduce = metrics({"x": Metric(torch.ones(3), "mean")})
mask_of_numbers = metrics({"x": Metric(torch.ones(3), Reduce.SUM, torch.ones(3))})

def mean_factor(tokens): return Correction(tokens.advantages.mean())
def only_factor(tokens): return tokens.advantages
def infinite(tokens): return Correction(tokens.advantages / 0)
def plain_factor(tokens): return Correction(tokens.advantages, {"x": 1.0})

def untyped(tokens):
    return Correction(None + 1)

def misspelt_kl(logprobs, ref):
    return ref.nothing
def mean_kl(logprobs, ref): return (logprobs - ref).mean()
def detached_kl(logprobs, ref): return (logprobs - ref).detach()

def by_position(num_tokens, group_ids, max_lengths): return 1 + num_tokens.cumsum(0)
def total(num_tokens, group_ids, max_lengths): return num_tokens.sum()
def half(num_tokens, group_ids, max_lengths): return 0.5 * num_tokens / num_tokens
def two_arguments(num_tokens, group_ids): return num_tokens

def short(inputs): return inputs.rewards[1:]
def listed_advantages(inputs): return inputs.rewards.tolist()
@per_sample
def of_tokens(inputs): return inputs.rewards
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_mistakes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_mistakes", None)


def problems(*overrides: str, has_teacher: bool = False) -> list[str]:
    config = load_config([f"trainer.algorithm.{override}" for override in overrides]).trainer.algorithm
    return list(algorithm_problems(config.values, config.parameters, PLACES, has_teacher=has_teacher))


def line_of(text: str) -> int:
    return MODULE[: MODULE.index(text)].count("\n") + 1


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("policy_loss_type", [*LOSSES, "own_mistakes:right", "own_mistakes:an_object"]),
        ("advantage_estimator", [*(name for name in ADVANTAGES if name != "zero"), "own_mistakes:per_group"]),
        ("kl_estimator_type", [*KL_ESTIMATORS, "own_mistakes:kl"]),
        ("loss_reduction", [*REDUCTIONS, "own_mistakes:by_position"]),
        ("corrections", [f"[{name}]" for name in (*CORRECTIONS, "own_mistakes:factor")]),
    ],
)
def test_built_in_functions_and_right_ones_are_accepted(key: str, names: list[str]):
    assert {name: found for name in names if (found := problems(f"{key}={name}"))} == {}


@pytest.mark.parametrize(
    ("name", "shape"), [("mean", "()"), ("first", "(1,)"), ("twice", "(2, 3)"), ("trained", "(2,)")]
)
def test_terms_that_would_broadcast_are_refused(name: str, shape: str):
    assert problems(f"policy_loss_type=own_mistakes:{name}") == [
        f"trainer.algorithm.policy_loss_type is own_mistakes:{name}: it returned terms of shape {shape} for 3 tokens "
        f"(own_mistakes.py:{line_of(f'def {name}(')}). Return one term per token, [P], not their mean or sum"
    ]


LOSS, CORRECTION = "policy_loss_type=own_mistakes:", "corrections=[own_mistakes:"
KL, CREDIT = "kl_estimator_type=own_mistakes:", "advantage_estimator=own_mistakes:"
LOSS_TERMS = "must return LossTerms(terms of shape [P], metrics)"


@pytest.mark.parametrize(
    ("override", "line", "given", "remedy"),
    [
        (LOSS + "tensor", "def tensor(", "it returned a Tensor", f"It {LOSS_TERMS}"),
        (LOSS + "none", "def none(", "it returned None", f"It {LOSS_TERMS}"),
        (LOSS + "number", "def number(", "terms of type float for 3 tokens", "Return one term per token"),
        (LOSS + "detached", "def detached(", "terms without a gradient", "Compute them from the policy's logprobs"),
        (LOSS + "nan", "def nan(", "terms [nan, nan] for trained tokens", "They must be finite"),
        (LOSS + "steep", "def steep(", "terms whose gradient is [inf, nan, nan]", "It must be finite"),
        (LOSS + "no_arguments", "def no_arg", "TypeError: no_arguments() takes 0 positional", LOSS_TERMS),
        (LOSS + "misspelt", "  tokens.logprob)", "AttributeError: 'TokenInputs' object has", LOSS_TERMS),
        (LOSS + "selecting", "@selects(", "ValueError: the selection <lambda> must", LOSS_TERMS),
        (LOSS + "plain", "def metrics(", "the metric x as a float", "Return Metric(values of shape [P], Reduce.X)"),
        (
            LOSS + "named_reduce",
            "def metrics(",
            "the metric x as Metric(..., 'mean')",
            "X one of TOKEN_MEAN, TOKEN_STD",
        ),
        (LOSS + "listed", "def metrics(", "metrics of type list", "Return a dict of name -> Metric"),
        (LOSS + "scalar_metric", "def metrics(", "the metric x with values of shape ()", "one number per token, [P]"),
        (LOSS + "float_metric", "def metrics(", "the metric x with values of type float", "a tensor of one number"),
        (LOSS + "mask_of_numbers", "def metrics(", "the metric x with a mask of shape (3,)", "must be a bool tensor"),
        (CORRECTION + "mean_factor", "def mean_factor(", "a factor of shape () for 3 tokens", "Return one factor per"),
        (CORRECTION + "only_factor", "def only_factor(", "returned a Tensor", "must return Correction(factor of shape"),
        (CORRECTION + "infinite", "def infinite(", "a factor [inf, inf] for trained", "They must be finite"),
        (CORRECTION + "plain_factor", "def plain_factor(", "the metric x as a float", "Return Metric(values of shape"),
        (KL + "mean_kl", "def mean_kl(", "values of shape () for 3 tokens", "Return one value per token, [P]"),
        (KL + "detached_kl", "def detached_kl(", "without a gradient", "Compute them from the policy's logprobs"),
        ("loss_reduction=own_mistakes:total", "def total(", "divisors of shape () for 3 samples", "one divisor per"),
        ("kl_loss_reduction=own_mistakes:half", "def half(", "divisors [0.5, 0.5] for samples with", "at least 1"),
        ("value_loss_reduction=own_mistakes:two_arguments", "def two_arg", "TypeError: two_arg", "return divisors of"),
        (CREDIT + "short", "def short(", "short returned (3,): it must return a tensor of shape (4,)", "of shape [T]"),
        (CREDIT + "listed_advantages", "def listed_adv", "returned list: it must return a tensor", "of shape [T]"),
        (CREDIT + "of_tokens", "@per_sample\ndef of_tokens", "takes 1 positional", "of_tokens(rewards of shape [B], g"),
    ],
)
def test_an_error_names_the_key_the_function_its_line_and_what_it_must_return(
    override: str, line: str, given: str, remedy: str
):
    (found,) = problems(override + "]" * ("[" in override))
    key, name = re.split(r"=\[?", override)
    assert re.match(rf"trainer\.algorithm\.{key} (is|has) {name}: ", found), found
    assert given in found and remedy in found.partition(f"(own_mistakes.py:{line_of(line)}). ")[2], found


def test_the_kl_estimator_of_a_distillation_is_called_too():
    key = "distillation.distillation_kl_estimator"
    (found,) = problems("distillation.distillation_type=loss", f"{key}=own_mistakes:mean_kl", has_teacher=True)
    assert found.startswith(f"trainer.algorithm.{key} is own_mistakes:mean_kl: it returned values of shape ()")


def test_a_parameter_of_the_wrong_type_is_shown_with_the_function_that_got_it():
    own = ["corrections=[own_mistakes:factor]", "advantage_estimator=own_mistakes:per_group"]
    (found,) = problems("policy_loss_type=own_mistakes:scaled", *own, "parameters={scale: half}")
    line = line_of("def scaled(")
    assert found == (
        "trainer.algorithm.policy_loss_type is own_mistakes:scaled: TypeError: bad operand type for unary -: 'str' "
        f"(own_mistakes.py:{line}). It is called as scaled(TokenInputs, scale='half') and {LOSS_TERMS}"
    )


def test_a_loss_that_fails_is_not_called_again_to_see_whether_advantages_of_zero_give_a_gradient():
    (found,) = problems("policy_loss_type=own_mistakes:tensor", "advantage_estimator=zero")
    assert "own_mistakes:tensor: it returned a Tensor" in found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([LOSS + "misspelt"], "policy_loss_type: own_mistakes:misspelt raised AttributeError: 'TokenInputs' object"),
        ([CORRECTION + "untyped]"], "corrections: own_mistakes:untyped raised TypeError: "),
        (
            [KL + "misspelt_kl", "use_kl_loss=true", "kl_loss_coef=0.1"],
            "kl_estimator_type: own_mistakes:misspelt_kl raised AttributeError: 'Tensor' object",
        ),
    ],
)
def test_an_own_function_that_raises_in_an_update_is_named_with_its_key_and_line(overrides: list[str], expected: str):
    """Here for the first call; the check before a run cannot see errors of later ones."""
    algorithm = load_config([f"trainer.algorithm.{override}" for override in overrides]).trainer.algorithm
    objective = build_objective(algorithm.values, 1.0)
    weights = {reduction: torch.ones(3) for reduction in objective.reductions}
    with pytest.raises(RuntimeError) as error:
        objective_loss(objective, sample_of_three(objective.needs, ()), weights)
    line = line_of(
        {"misspelt": "  tokens.logprob)", "misspelt_kl": "ref.nothing", "untyped": "None + 1"}[
            re.split("[:\\]]", overrides[0])[1]
        ]
    )
    assert str(error.value).startswith(f"trainer.algorithm.{expected}")
    assert str(error.value).endswith(f" (own_mistakes.py:{line})")


def test_an_error_of_a_function_of_the_package_keeps_its_type():
    objective = build_objective(load_config([]).trainer.algorithm.values, 1.0)
    with pytest.raises(AttributeError):
        objective_loss(objective, None, {})  # type: ignore[arg-type]


def test_a_factor_that_is_not_finite_where_nothing_is_trained_leaves_the_gradient_finite():
    """0 / 0 for a sample without a trained token, such as one that is masked or the padding of a rank."""

    def mean_ratio(tokens: TokenInputs) -> Correction:
        difference = tokens.per_sample.sum(tokens.old_logprobs - tokens.rollout_logprobs)
        return Correction((difference / tokens.per_sample.num_tokens).exp())

    algorithm = load_config(["trainer.algorithm.use_kl_loss=false"]).trainer.algorithm
    objective = replace(build_objective(algorithm.values, 1.0), corrections=(Bound(mean_ratio),))
    mask, engine = torch.tensor([True, True, False, False]), torch.full((4,), -1.1)
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -2.0], requires_grad=True)
    signals = {"old_logprobs": engine + 0.1, "rollout_logprobs": engine, "advantages": torch.ones(4)}
    tokens = TokenInputs(logprobs, mask, PerSample(torch.tensor([0, 0, 1, 1]), 2, mask), signals)
    loss, _ = objective_loss(objective, tokens, {reduction: mask / 2 for reduction in objective.reductions})
    loss.backward()
    assert logprobs.grad is not None and loss.isfinite()
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1) / 2, -math.exp(0.1) / 2, 0, 0])


def test_metrics_that_differ_between_micro_batches_are_not_added_under_one_name():
    mask = torch.ones(2, dtype=torch.bool)
    tokens = TokenInputs(torch.zeros(2), mask, PerSample(torch.zeros(2, dtype=torch.int64), 1, mask))
    sums = MicroBatchSums()
    for _ in range(2):
        sums.add({"a": Metric(torch.zeros(2), Reduce.TOKEN_MEAN)}, tokens)
    with pytest.raises(ValueError, match="other metrics than for the micro-batch before: a, b. Return the same"):
        sums.add({"b": Metric(torch.zeros(2), Reduce.TOKEN_MEAN)}, tokens)
