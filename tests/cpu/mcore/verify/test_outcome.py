"""How far two outcomes are apart, in numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import tensor

from skyrl_train.megatron.verify.outcome import Difference, Outcome, Tolerance, compare

REFERENCE = Outcome(
    {"a": tensor([3.0, 4.0]), "b": tensor([0.0, 12.0]), "unused": tensor([0.0])},
    tensor([0.0, -1.0, -2.0]),
    {"loss": -0.5, "grad_norm": 20.0},
)
BOUNDS = Tolerance(gradient=0.1, worst_tensor=0.2, logprobs=0.3, metrics=0.4)


def test_differences_are_those_of_a_hand_calculation():
    other = Outcome(
        {"a": tensor([3.0, 2.0]), "b": tensor([3.0, 12.0]), "unused": tensor([0.25])},
        tensor([0.0, -1.25, -1.5]),
        {"loss": -0.75, "grad_norm": 25.0},
    )
    difference = compare(other, REFERENCE)
    assert difference.tensors == pytest.approx({"a": 2 / 5, "b": 3 / 12, "unused": 0.25})
    assert difference.gradient == pytest.approx(math.sqrt((4 + 9 + 0.0625) / (25 + 144)))
    assert difference.logprobs == 0.5 / 2
    assert difference.metrics == {"loss": 0.25, "grad_norm": 0.25}


def test_logprobs_below_one_are_compared_as_they_are():
    near = replace(REFERENCE, logprobs=tensor([0.0, -0.5, -0.25]))
    assert compare(replace(near, logprobs=tensor([0.0, -0.5, -0.5])), near).logprobs == 0.25


def test_outcomes_of_different_models_are_not_compared():
    with pytest.raises(ValueError, match=r"gradients differ in their names: \[\] are only in the first, \['unused'\]"):
        compare(replace(REFERENCE, gradients={name: REFERENCE.gradients[name] for name in ("a", "b")}), REFERENCE)
    with pytest.raises(ValueError, match=r"metrics differ in their names: \['lr'\] are only in the first"):
        compare(replace(REFERENCE, metrics=REFERENCE.metrics | {"lr": 0.0}), REFERENCE)


def test_each_broken_bound_is_said_with_the_worst_of_its_kind():
    difference = Difference({"a": 0.2, "b": 0.5, "c": 0.3}, 0.25, 0.75, {"loss": 0.5, "grad_norm": 2.0})
    assert BOUNDS.exceeded(difference) == [
        "the gradient is off by 2.5e-01, more than 1e-01",
        "the gradient of b is off by 5.0e-01, more than 2e-01",
        "a logprob, over the largest, is off by 7.5e-01, more than 3e-01",
        "the metric grad_norm is off by 2.0e+00, more than 4e-01",
    ]
    assert BOUNDS.exceeded(Difference({"a": 0.2}, 0.1, 0.3, {"loss": 0.4})) == []


@pytest.mark.parametrize("names", [("nan", "fine"), ("fine", "nan")])
def test_what_is_not_a_number_breaks_its_bound_at_any_position(names: tuple[str, str]):
    values = {name: math.nan if name == "nan" else 0.0 for name in names}
    assert BOUNDS.exceeded(Difference(values, math.nan, math.nan, values)) == [
        "the gradient is off by nan, more than 1e-01",
        "the gradient of nan is off by nan, more than 2e-01",
        "a logprob, over the largest, is off by nan, more than 3e-01",
        "the metric nan is off by nan, more than 4e-01",
    ]
