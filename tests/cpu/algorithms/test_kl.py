import math

import pytest
import torch

from skyrl_train.algorithms.kl import k1, k2, k3
from skyrl_train.algorithms.tables import KL_ESTIMATORS

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -0.5])
REF = torch.tensor([-1.5, -1.0, -0.5, -30.5])


def test_k1_is_the_log_ratio():
    torch.testing.assert_close(k1(LOGPROBS, REF), torch.tensor([0.5, -1.0, 0.0, 30.0]))


def test_k2_is_half_the_squared_log_ratio():
    torch.testing.assert_close(k2(LOGPROBS, REF), torch.tensor([0.125, 0.5, 0.0, 450.0]))


def test_k3_is_the_ratio_minus_one_minus_its_logarithm():
    # exp(-0.5) - 1 + 0.5, e - 2, 0, exp(-30) - 1 + 30
    expected = torch.tensor([math.exp(-0.5) - 0.5, math.e - 2, 0.0, 29.0])
    torch.testing.assert_close(k3(LOGPROBS, REF), expected, rtol=1e-6, atol=0)


def test_gradient_of_k3_is_one_minus_the_ratio():
    logprobs = LOGPROBS.clone().requires_grad_()
    k3(logprobs, REF).sum().backward()
    expected = torch.tensor([1 - math.exp(-0.5), 1 - math.e, 0.0, 1.0])
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-6, atol=0)


def test_k3_of_close_policies_does_not_cancel():
    difference = 2.0**-14  # exact in float32
    value = float(k3(torch.tensor([0.0]), torch.tensor([difference])))
    assert value == pytest.approx(difference**2 / 2, rel=1e-3)  # exp(d) - 1 - d in float32 is off by 100 %


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_value_and_gradient_are_finite_for_any_difference(name, difference):
    logprobs = torch.tensor([0.0], requires_grad=True)
    value = KL_ESTIMATORS[name](logprobs, torch.tensor([difference]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(("name", "tolerance"), [("k1", 0.01), ("k3", 0.01)])
def test_expected_value_over_the_policy_is_the_divergence(name, tolerance):
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = sum(p * math.log(p / q) for p, q in zip([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], strict=True))
    expected = float((policy * KL_ESTIMATORS[name](policy.log(), reference.log())).sum())
    assert expected == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(name):
    difference = torch.linspace(-25, 25, 2001)
    assert float(KL_ESTIMATORS[name](torch.zeros(2001), difference).min()) >= 0
