import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.inputs import LossTerms, PerSample, TokenInputs
from skyrl_train.algorithms.losses.value import clipped_value_loss
from skyrl_train.algorithms.reductions import weighted_sum
from skyrl_train.algorithms.tables import CORRECTIONS, LOSSES

VALUES = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 3.0,
    "cispo_eps_clip_low": 1.0,
    "cispo_eps_clip_high": 0.5,
    **{"tau_pos": 1.0, "tau_neg": 1.05, "dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2},
    **{"clip_ratio": 0.1, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_frac": 0.1, "ppo_kl_coef": 1.0},
    "top_entropy_quantile": 0.2,
    **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
}
SELECTIONS = ("covariance_within", "highest_covariance", "highest_entropy")
RATIOS = torch.tensor([0.5, 1.0, 1.25, 1.5, 0.5, 1.0, 1.5, 10.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
OLD = torch.full((8,), -1.0, dtype=torch.float64)


def nothing_selected(mask):
    return {f"selected_by_{name}": torch.zeros_like(mask) for name in SELECTIONS}


def inputs(logprobs, old, advantages, *, samples=None, mask=None, **signals):
    """One sample, or the given one for each token."""
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else torch.tensor(mask)
    sample = torch.zeros(len(logprobs), dtype=torch.int64) if samples is None else torch.tensor(samples)
    per_sample = PerSample(sample, int(sample.max()) + 1, mask)
    return TokenInputs(
        logprobs,
        mask,
        per_sample,
        {"old_logprobs": old, "advantages": advantages, "rollout_logprobs": old, **nothing_selected(mask), **signals},
    )


def computed(name, tokens):
    terms, metrics = bind(LOSSES[name], VALUES)(tokens)
    assert not any(metric.values.requires_grad for metric in metrics.values())
    return terms, metrics["clip_ratio"].values if "clip_ratio" in metrics else None


def terms_and_gradient(name):
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    terms, clipped = computed(name, inputs(logprobs, OLD, ADVANTAGES))
    terms.sum().backward()
    return terms.detach(), clipped, logprobs.grad


def test_regular_clips_each_side_at_its_own_bound():
    terms, clipped, gradient = terms_and_gradient("regular")
    # A > 0: min(ratio, 1.3) * 2; A < 0: max(ratio, 0.8).
    torch.testing.assert_close(terms, torch.tensor([-1.0, -2.0, -2.5, -2.6, 0.8, 1.0, 1.5, 10.0], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, -2.5, 0, 0, 1.0, 1.5, 10.0], dtype=torch.float64))


def test_dual_clip_bounds_the_term_of_a_negative_advantage():
    terms, clipped, gradient = terms_and_gradient("dual_clip")
    torch.testing.assert_close(terms, torch.tensor([-1.0, -2.0, -2.5, -2.6, 0.8, 1.0, 1.5, 3.0], dtype=torch.float64))
    assert clipped.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, -2.5, 0, 0, 1.0, 1.5, 0], dtype=torch.float64))


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    terms, clipped, gradient = terms_and_gradient("cispo")
    weight = torch.tensor([0.5, 1.0, 1.25, 1.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(gradient, -weight * ADVANTAGES)
    torch.testing.assert_close(terms, -weight * ADVANTAGES * (RATIOS.log() - 1))
    assert clipped.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_cross_entropy_is_the_negative_logprob():
    terms, clipped, gradient = terms_and_gradient("cross_entropy")
    torch.testing.assert_close(terms, 1 - RATIOS.log())
    assert gradient.tolist() == [-1.0] * 8 and clipped is None


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
@settings(deadline=None)
@given(logprob=st.floats(-10, 0), advantage=st.floats(-5, 5))
def test_first_update_is_the_policy_gradient(name, logprob, advantage):
    logprobs = torch.tensor([logprob], requires_grad=True)
    terms, clipped = computed(name, inputs(logprobs, logprobs.detach().clone(), torch.tensor([advantage])))
    terms.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-advantage]))
    assert clipped is None or clipped.item() == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("logprob", [-1e4, -200.0, 0.0, -math.inf])
@pytest.mark.parametrize("old_logprob", [-1e4, -200.0, 0.0])
def test_a_masked_token_adds_nothing_whatever_its_logprobs(name, logprob, old_logprob):
    logprobs = torch.tensor([-1.0, logprob], requires_grad=True)
    old = torch.tensor([-1.0, old_logprob])
    terms, clipped = computed(name, inputs(logprobs, old, torch.tensor([1.0, -1.0]), mask=[True, False]))
    total = weighted_sum(terms, torch.tensor([1.0, 0.0]))
    total.backward()
    alone, _ = computed(name, inputs(logprobs[:1].detach(), old[:1], torch.tensor([1.0])))
    assert total.item() == pytest.approx(alone.item())
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert clipped is None or torch.isfinite(clipped).all()


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None)
@given(logprob=st.floats(-60, 0), old=st.floats(-60, 0), advantage=st.floats(-5, 5))
def test_terms_and_gradients_are_finite_at_any_distance(name, logprob, old, advantage):
    logprobs = torch.tensor([logprob, -1.0], requires_grad=True)
    terms, _ = computed(name, inputs(logprobs, torch.tensor([old, -1.0]), torch.tensor([advantage, 1.0])))
    terms.sum().backward()
    assert torch.isfinite(terms).all() and torch.isfinite(logprobs.grad).all()


def test_sapo_fades_on_both_sides_of_the_ratio():
    terms, _, gradient = terms_and_gradient("sapo")
    gate = torch.sigmoid(RATIOS[:4] - 1)
    torch.testing.assert_close(terms[:4], -2 * 4 * gate)
    torch.testing.assert_close(gradient[:4], -2 * 4 * gate * (1 - gate) * RATIOS[:4])


def test_dppo_drops_tokens_whose_probability_moved_too_far_in_their_advantages_direction():
    p, q = torch.tensor([0.8, 0.8, 0.3, 0.3]), torch.tensor([0.5, 0.5, 0.6, 0.6])
    logprobs = p.log().requires_grad_()
    tokens = inputs(logprobs, q.log(), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    terms, dropped = computed("dppo", tokens)
    torch.testing.assert_close(terms, torch.tensor([0.0, 1.6, -0.5, 0.0]))
    assert dropped.tolist() == [1, 0, 0, 1]


def test_topr_weighs_bad_samples_by_the_ratio_of_the_whole_sample():
    logprobs = torch.tensor([0.5, 0.4, 0.5, 0.4]).log().requires_grad_()
    old = torch.full((4,), 0.5).log()
    tokens = inputs(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), samples=[0, 0, 1, 1])
    computed("topr", tokens)[0].sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, -1.0, 0.8, 0.8]))


def test_gspo_has_one_ratio_for_each_sample_and_the_gradient_of_that_ratio():
    # Two samples of two trained tokens; the third token of the first is not trained.
    logprobs = torch.tensor([-1.0, -1.2, -9.0, -0.9, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.2, -1.0, -1.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    tokens = inputs(logprobs, old, advantages, samples=[0, 0, 0, 1, 1], mask=[True, True, False, True, True])
    terms, clipped = computed("gspo", tokens)
    ratio = math.exp(0.05)  # of both samples: means of 0.1 and 0, and of 0.1 and 0
    weights = torch.tensor([0.25, 0.25, 0, 0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(
        terms[[0, 1, 3, 4]].detach(), torch.tensor([-ratio, -ratio, 2 * ratio, 2 * ratio], dtype=torch.float64)
    )
    weighted_sum(terms, weights).backward()
    expected = torch.tensor([-ratio / 4, -ratio / 4, 0, ratio / 2, ratio / 2], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    assert not clipped.any()


def test_sums_of_a_sample_carry_the_gradient_to_its_trained_tokens():
    logprobs = torch.tensor([1.0, 2.0, 5.0, 3.0], requires_grad=True)
    per_sample = inputs(logprobs, OLD, OLD, samples=[0, 0, 1, 1], mask=[True, True, False, True]).per_sample
    assert per_sample.sum(logprobs).tolist() == [3.0, 3.0, 3.0, 3.0]
    assert per_sample.mean(logprobs).tolist() == [1.5, 1.5, 3.0, 3.0]
    per_sample.mean(logprobs.square())[0].backward()
    assert logprobs.grad.tolist() == [1.0, 2.0, 0.0, 0.0]


def test_corrections_weigh_tokens_by_how_likely_the_trainer_finds_them():
    old = torch.log(torch.tensor([1.0, 4.0, 0.1]))
    tokens = inputs(old, old, torch.ones(3), rollout_logprobs=torch.zeros(3))
    values = {"token_tis_ratio_clip_high": 2.0, "icepop_low": 0.5, "icepop_high": 5.0}
    truncated, kept = (bind(CORRECTIONS[name], values)(tokens).factor for name in ("token_tis", "icepop"))
    torch.testing.assert_close(truncated, torch.tensor([1.0, 2.0, 0.1]))
    torch.testing.assert_close(kept, torch.tensor([1.0, 4.0, 0.0]))


def test_a_signal_that_was_not_declared_says_how_to_declare_it():
    with pytest.raises(LookupError, match=r"entropy is not computed here.*@needs\('entropy'\)"):
        _ = inputs(OLD, OLD, OLD).entropy


@pytest.mark.parametrize("value_clip", [0.5, None])
def test_the_value_loss_takes_the_larger_error_of_the_value_and_the_clipped_value(value_clip):
    old = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    values = torch.tensor([0.25, 1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, 2.0, 0.0, 0.25], dtype=torch.float64)
    tokens = inputs(values, old, old, values=values, old_values=old, returns=returns)
    terms, metrics = clipped_value_loss(tokens, value_clip=value_clip)
    (gradient,) = torch.autograd.grad(terms.sum(), values)
    if value_clip is None:
        assert terms.tolist() == [1.75**2 / 2, 0.5, 0.5, 0.25**2 / 2]
        assert gradient.tolist() == [-1.75, -1.0, 1.0, -0.25]
        assert metrics["clip_ratio"].values.tolist() == [0, 0, 0, 0]
    else:  # clipped to 0.25, 0.5, 0.5, 0.5: the second is farther from its return, the fourth as far
        assert terms.tolist() == [1.75**2 / 2, 1.5**2 / 2, 0.5, 0.25**2 / 2]
        assert gradient.tolist() == [-1.75, 0.0, 1.0, -0.125]
        assert metrics["clip_ratio"].values.tolist() == [0, 1, 0, 0]


def test_a_parameter_that_is_nearly_a_key_is_named_with_it():
    def misspelt(tokens: TokenInputs, *, eps_clip_lo: float) -> LossTerms:
        raise NotImplementedError

    with pytest.raises(ValueError, match=r"takes eps_clip_lo: no key has this name. Did you mean eps_clip_low"):
        bind(misspelt, VALUES)


def test_advantages_that_differ_within_a_sample_count_as_their_mean_in_gmpo():
    """Also for the side on which ratios are clipped."""
    old, gradients = torch.tensor([-1.0, -2.0], dtype=torch.float64), []
    for advantages in ([3.0, -1.0], [1.0, 1.0]):
        logprobs = torch.full((2,), -1.0, dtype=torch.float64, requires_grad=True)
        terms, _ = computed("gmpo", inputs(logprobs, old, torch.tensor(advantages, dtype=torch.float64)))
        terms.sum().backward()
        assert logprobs.grad is not None
        gradients.append([*terms.tolist(), *logprobs.grad.tolist()])
    assert gradients[0] == gradients[1] and gradients[0][-1] == 0, "the second token is clipped"
