import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.losses import LOSSES, LossSettings, cispo, cross_entropy, dual_clip, regular
from skyrl_train.algorithms.reductions import weighted_sum

SETTINGS = LossSettings(
    eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=3.0, cispo_eps_clip_low=1.0, cispo_eps_clip_high=0.5
)
RATIOS = torch.tensor([0.5, 1.0, 1.25, 1.5, 0.5, 1.0, 1.5, 10.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
OLD = torch.full((8,), -1.0, dtype=torch.float64)


def terms_and_gradient(loss):
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    terms, clipped = loss(logprobs, OLD, ADVANTAGES, SETTINGS)
    terms.sum().backward()
    return terms.detach(), clipped, logprobs.grad


def test_regular_clips_each_side_at_its_own_bound():
    terms, clipped, gradient = terms_and_gradient(regular)
    # A > 0: min(ratio, 1.3) * 2; A < 0: max(ratio, 0.8).
    torch.testing.assert_close(terms, torch.tensor([-1.0, -2.0, -2.5, -2.6, 0.8, 1.0, 1.5, 10.0], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, -2.5, 0, 0, 1.0, 1.5, 10.0], dtype=torch.float64))


def test_dual_clip_bounds_the_term_of_a_negative_advantage():
    terms, clipped, gradient = terms_and_gradient(dual_clip)
    torch.testing.assert_close(terms, torch.tensor([-1.0, -2.0, -2.5, -2.6, 0.8, 1.0, 1.5, 3.0], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, -2.5, 0, 0, 1.0, 1.5, 0], dtype=torch.float64))


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    terms, clipped, gradient = terms_and_gradient(cispo)
    weight = torch.tensor([0.5, 1.0, 1.25, 1.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(gradient, -weight * ADVANTAGES)
    torch.testing.assert_close(terms, -weight * ADVANTAGES * (RATIOS.log() - 1))
    assert clipped.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_cross_entropy_is_the_negative_logprob():
    terms, clipped, gradient = terms_and_gradient(cross_entropy)
    torch.testing.assert_close(terms, 1 - RATIOS.log())
    assert gradient.tolist() == [-1.0] * 8 and clipped.tolist() == [0.0] * 8


@pytest.mark.parametrize("loss", [regular, dual_clip, cispo])
@settings(deadline=None)
@given(logprob=st.floats(-10, 0), advantage=st.floats(-5, 5))
def test_first_update_is_the_policy_gradient(loss, logprob, advantage):
    logprobs = torch.tensor([logprob], requires_grad=True)
    terms, clipped = loss(logprobs, logprobs.detach().clone(), torch.tensor([advantage]), SETTINGS)
    terms.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-advantage]))
    assert clipped.item() == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("logprob", [-1e4, -200.0, 0.0, -math.inf])
@pytest.mark.parametrize("old_logprob", [-1e4, -200.0, 0.0])
def test_a_masked_token_adds_nothing_whatever_its_logprobs(name, logprob, old_logprob):
    logprobs = torch.tensor([-1.0, logprob], requires_grad=True)
    old = torch.tensor([-1.0, old_logprob])
    terms, clipped = LOSSES[name](logprobs, old, torch.tensor([1.0, -1.0]), SETTINGS)
    total = weighted_sum(terms, torch.tensor([1.0, 0.0]))
    total.backward()
    assert total.item() == pytest.approx(1.0 if name in ("cispo", "cross_entropy") else -1.0)
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert torch.isfinite(clipped).all()


@pytest.mark.parametrize("name", LOSSES)
def test_clipped_carries_no_gradient(name):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    _, clipped = LOSSES[name](logprobs, torch.tensor([-3.0]), torch.tensor([1.0]), SETTINGS)
    assert not clipped.requires_grad
