import math

import pytest
import torch

from skyrl_train.algorithms.build import build_objective, needs_advantages
from skyrl_train.algorithms.distillation import teacher_advantages, topk_forward, topk_reverse
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.kl import k2
from skyrl_train.algorithms.objective import objective_loss
from skyrl_train.config import load_config

MASK = torch.tensor([True, True, False])
OLD = torch.tensor([-1.0, -2.0, -9.0], dtype=torch.float64)
TEACHER = torch.tensor([-0.5, -2.25, -1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)


def inputs(logprobs=None, **signals):
    logprobs = OLD.clone().requires_grad_() if logprobs is None else logprobs
    given = {"old_logprobs": OLD, "rollout_logprobs": OLD, "advantages": ADVANTAGES, "teacher_logprobs": TEACHER}
    return TokenInputs(logprobs, MASK, PerSample(torch.zeros(3, dtype=torch.int64), 1, MASK), given | signals)


def objective(kind, *overrides):
    prefix = "trainer.algorithm."
    keys = [f"{prefix}distillation.distillation_type={kind}", f"{prefix}use_kl_loss=false", *overrides]
    return build_objective(load_config(keys).trainer.algorithm.values, 1.0)


def test_the_advantage_falls_by_the_reverse_kl_of_each_token():
    # 2 - 0.5 (-1 + 0.5) = 2.25; 0 - 0.5 (-2 + 2.25) = -0.125
    result = teacher_advantages(inputs(), distillation_coef=0.5)
    assert result[:2].tolist() == [2.25, -0.125]


def test_corrections_read_the_advantages_of_the_teacher():
    seen = []
    opsm = objective("advantage", "trainer.algorithm.corrections=[opsm]")
    tokens = opsm.shaped(inputs())
    seen.append(opsm.corrections[0](tokens))
    assert tokens.advantages[:2].tolist() == [2.5, -0.25]
    assert not tokens.advantages.requires_grad


def test_on_policy_the_gradient_of_both_forms_is_that_of_the_reverse_kl():
    """d/dx of (x - t)^2 / 2 and of -r (t - x_old): x - t at x = x_old."""
    weights = {"token_mean": torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)}
    for kind, extra in (("advantage", {"advantages": torch.zeros(3, dtype=torch.float64)}), ("loss", {})):
        tokens = inputs(**extra)
        loss, metrics = objective_loss(objective(kind), tokens, weights)
        (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
        policy = 0.0 if kind == "advantage" else -0.5 * ADVANTAGES * torch.tensor([1.0, 1.0, 0.0])
        expected = torch.tensor([-0.25, 0.125, 0.0], dtype=torch.float64) + policy
        torch.testing.assert_close(gradient, expected)
        assert metrics["policy/teacher_kl"].values[:2].tolist() == [-0.5, 0.25]
        if kind == "loss":
            value = k2(OLD, TEACHER)[:2].mean()
            torch.testing.assert_close(metrics["policy/distillation_loss"].values.detach(), value)


def test_the_kl_over_likely_tokens_has_hand_computed_values():
    policy = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.3]], dtype=torch.float64).log()
    tokens = inputs(topk_logprobs=policy, teacher_topk_logprobs=teacher)
    forward, reverse = topk_forward(tokens), topk_reverse(tokens)
    assert float(forward.terms) == pytest.approx(0.9 * math.log(1.2), abs=1e-15)
    assert float(reverse.terms) == pytest.approx(-0.75 * math.log(1.2), abs=1e-15)  # the tail is left out
    assert float(forward.metrics["teacher_topk_mass"].values) == pytest.approx(0.9, abs=1e-15)
    (gradient,) = torch.autograd.grad(forward.terms.sum(), policy, retain_graph=True)
    torch.testing.assert_close(gradient, -teacher.exp())
    (gradient,) = torch.autograd.grad(reverse.terms.sum(), policy)
    torch.testing.assert_close(gradient, policy.exp() * (policy - teacher + 1))


def test_equal_models_have_neither_a_kl_nor_a_gradient_of_its_own():
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    tokens = inputs(topk_logprobs=logprobs, teacher_topk_logprobs=logprobs.detach())
    for term in (topk_forward, topk_reverse):
        values = term(tokens).terms
        (gradient,) = torch.autograd.grad(values.sum(), logits, retain_graph=True)
        torch.testing.assert_close(values, torch.zeros_like(values))
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("kind", ["advantage", "loss", "topk_forward", "topk_reverse"])
def test_a_step_without_advantages_still_has_a_signal(kind: str):
    assert not needs_advantages(objective(kind))
    assert needs_advantages(objective("null"))


def test_terms_stay_finite_for_tokens_that_a_model_excludes():
    far = torch.tensor([-700.0, -1.0, -1.0], dtype=torch.float64)
    weights = {"token_mean": torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)}
    for kind in ("advantage", "loss"):
        tokens = inputs(teacher_logprobs=far)
        loss, _ = objective_loss(objective(kind), tokens, weights)
        (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
