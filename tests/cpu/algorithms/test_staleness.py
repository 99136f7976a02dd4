"""Tokens of older weights: interpolated old logprobs, and metrics by staleness, against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.build import build_objective
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce, Total, merged, partial_sums
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.algorithms.staleness import Buckets, loglinear
from skyrl_train.config import load_config
from skyrl_train.service.runner import NEEDS_LOGPROBS

DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("behind", "num_steps", "expected"),
    [
        (0, 0, -1.0),  # before the first optimizer step the current policy is the old one, whoever sampled
        (3, 0, -1.0),
        (-1, 0, -1.0),
        (0, 1, -2.0),  # the engine's weights were those before the step
        (1, 1, -1.5),  # half of the way from the engine's to the current policy
        (1, 3, -1.75),
        (3, 1, -1.25),
        (8, 4, -2 + 2 / 3),
        (-1, 2, -2.0),  # unknown
    ],
)
def test_the_old_logprob_lies_between_those_of_engine_and_trainer_by_versions(
    behind: int, num_steps: int, expected: float
):
    logprobs, rollout = torch.tensor([-1.0], dtype=DOUBLE), torch.tensor([-2.0], dtype=DOUBLE)
    found = loglinear(logprobs, rollout, torch.tensor([behind], dtype=torch.int32), num_steps)
    assert found.item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("num_steps", [0, 1, 1000])
def test_interpolated_logprobs_are_finite_and_between_both_at_extreme_values(num_steps: int):
    ends = torch.tensor([0.0, -1e-7, -100.0, -3e4, -1e30])
    logprobs, rollout = (grid.flatten() for grid in torch.meshgrid(ends, ends, indexing="ij"))
    for behind in (0, 1, 2**31 - 1):
        found = loglinear(logprobs, rollout, torch.full(logprobs.shape, behind, dtype=torch.int32), num_steps)
        assert bool(torch.isfinite(found).all())
        low, high = torch.minimum(logprobs, rollout), torch.maximum(logprobs, rollout)
        slack = 1e-6 * (high - low)
        assert bool(((low - slack <= found) & (found <= high + slack)).all())


def objective_of(*overrides: str) -> Objective:
    values = load_config([f"trainer.algorithm.{override}" for override in overrides]).trainer.algorithm.values
    return build_objective(values, 1.0)


def tokens_of(**signals: list[float]) -> TokenInputs:
    """Two samples, of three and of two tokens; the policy wrote all of them but the last."""
    tensors = {name: torch.tensor(values, dtype=DOUBLE) for name, values in signals.items()}
    staleness = tensors.pop("staleness").int()
    logprobs, mask = tensors.pop("logprobs").requires_grad_(), torch.tensor([True, True, True, True, False])
    per_sample = PerSample(torch.tensor([0, 0, 0, 1, 1]), 2, mask)
    return TokenInputs(logprobs, mask, per_sample, {**tensors, "staleness": staleness})


def summed(objective: Objective, tokens: TokenInputs) -> tuple[Tensor, dict[str, float]]:
    weights = {name: tokens.loss_mask * torch.tensor(0.25, dtype=DOUBLE) for name in objective.reductions}
    loss, metrics = objective_loss(objective, tokens, weights)
    numbers = tokens.per_sample.num_tokens
    return loss, merged([{name: total(metric, tokens.loss_mask, numbers) for name, metric in metrics.items()}])


def total(metric: Metric, mask: Tensor, numbers: Tensor) -> Total:
    sums = partial_sums(metric, mask, numbers).tolist()
    return Total(
        metric.reduce, (*sums, 1.0) if metric.reduce is Reduce.STEP_MEAN else tuple(sums), metric.mask is not None
    )


def test_the_third_pass_clips_and_weighs_by_interpolated_logprobs():
    """Of decoupled PPO: -min(r A, clip(r) A) min(p / b, 2) / 4, with p = b (theta / b)^(d / (d + 2))."""
    gaps, behind, advantage = [0.3, -0.6, 1.2, 0.9, 5.0], [1, 2, 0, 6, 0], [1.0, -2.0, 0.5, 1.0, 1.0]
    rollout = [-1.0, -2.0, -0.7, -1.5, -9.0]
    logprobs = [b + gap for b, gap in zip(rollout, gaps, strict=True)]
    objective = objective_of("prox_logp_method=loglinear", "corrections=[token_tis]", "use_kl_loss=false").after(2)
    given = tokens_of(logprobs=logprobs, rollout_logprobs=rollout, advantages=advantage, staleness=behind)
    old = objective.old_logprobs(given.logprobs.detach(), given.signals)
    tokens = replace(given, signals={**given.signals, "old_logprobs": old})
    loss, metrics = summed(objective, tokens)
    expected, slopes = 0.0, []
    for gap, d, a in list(zip(gaps, behind, advantage, strict=True))[:4]:
        share = d / (d + 2)
        ratio, weight = math.exp((1 - share) * gap), min(math.exp(share * gap), 2.0)
        clipped = min(max(ratio, 0.8), 1.2)
        expected -= min(ratio * a, clipped * a) * weight / 4
        slopes.append(0.0 if clipped * a < ratio * a else -ratio * a * weight / 4)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, given.logprobs)
    assert gradient.tolist() == pytest.approx([*slopes, 0.0], rel=1e-12)
    assert metrics["policy/approx_kl"] == pytest.approx(-(0.2 - 0.3 + 1.2 + 0.225) / 4)
    assert not [name for name in metrics if "rollout_train" in name], "they would measure the interpolation"


def test_the_first_pass_is_that_of_recomputed_logprobs():
    logprobs = torch.tensor([-1.0, -2.0])
    objective = objective_of("prox_logp_method=loglinear")
    assert objective.after(0).old_logprobs(logprobs, {}) is logprobs
    assert objective_of().after(3).old_logprobs(logprobs, {}) is logprobs, "where none were kept, it is the only pass"


def test_each_bucket_has_the_metrics_of_its_own_tokens():
    log_weights = [0.0, math.log(4), math.log(1.5), math.log(0.5)]
    rollout = [-2.0] * 5
    old = [b + each for b, each in zip(rollout, [*log_weights, 3.0], strict=True)]
    objective = replace(
        objective_of("corrections=[token_tis]", "use_kl_loss=false"), buckets=Buckets(last=2, versions_per_step=2)
    )
    tokens = tokens_of(
        logprobs=[-2.0, -1.0, old[2], -3.0, 0.0],
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=[1.0] * 5,
        staleness=[0, 2, 1, 8, 8],  # versions: steps 0, 1, 1 and 4
    )
    _, metrics = summed(objective, tokens)

    def of(name: str) -> list[float]:
        return [metrics[f"policy/staleness_{bucket}/{name}"] for bucket in (0, 1, 2)]

    assert of("rollout_train_ratio_mean") == pytest.approx([1.0, 2.75, 0.5])
    assert of("rollout_train_effective_share") == pytest.approx([1.0, 5.5**2 / (2 * 18.25), 1.0])
    k3 = [w - 1 - math.log(w) for w in (4.0, 1.5, 0.5)]
    assert of("rollout_train_kl") == pytest.approx([0.0, (k3[0] + k3[1]) / 2, k3[2]])
    assert of("rollout_train_kl_k1") == pytest.approx([0.0, -math.log(6) / 2, math.log(2)])
    assert of("correction/token_tis/tis_token_clip_high_ratio") == [0.0, 0.5, 0.0]
    assert of("loss_metrics/clip_ratio") == [0.0, 0.0, 0.0]
    mean = (1 + 4 + 1.5 + 0.5) / 4
    assert metrics["policy/rollout_train_ratio_mean"] == pytest.approx(mean)


@pytest.mark.parametrize(("overrides", "expected"), [([], 1.0), (["use_corrected_kl=true"], 0.0)])
def test_the_kl_terms_are_corrected_on_request(overrides: list[str], expected: float):
    """Of four trained tokens, icepop drops those with weights of 8 and 1/8; their KL term is the only one."""
    tokens = tokens_of(
        logprobs=[-2.0] * 5,
        old_logprobs=[-2.0] * 5,
        rollout_logprobs=[-2 - math.log(8), -2 + math.log(8), -2 - math.log(4), -2.0, -2.0],
        ref_logprobs=[-1.0, -1.0, -2.0, -2.0, 0.0],
        teacher_logprobs=[-1.0, -1.0, -2.0, -2.0, 0.0],
        advantages=[0.0] * 5,
        staleness=[1] * 5,
    )
    k2 = (0.5 + 0.5) / 4
    for kind in (
        ["kl_estimator_type=k2", "kl_loss_coef=1"],
        ["use_kl_loss=false", "distillation.distillation_type=loss"],
    ):
        loss, _ = summed(objective_of("corrections=[icepop]", *kind, *overrides), tokens)
        assert loss.item() == pytest.approx(expected * k2, abs=1e-15)


def test_buckets_count_steps_and_the_last_is_open():
    versions = torch.tensor([-1, 0, 1, 4, 5, 8, 9, 400], dtype=torch.int32)
    assert Buckets(last=2, versions_per_step=4).of(versions).tolist() == [-1, 0, 1, 1, 2, 2, 2, 2]
    assert Buckets(last=4, versions_per_step=1).of(versions).tolist() == [-1, 0, 1, 4, 4, 4, 4, 4]


def test_a_bucket_without_tokens_is_not_logged():
    objective = replace(objective_of("use_kl_loss=false"), buckets=Buckets(last=1, versions_per_step=1))
    tokens = tokens_of(
        logprobs=[-1.0] * 5,
        old_logprobs=[-1.0] * 5,
        rollout_logprobs=[-1.0] * 5,
        advantages=[1.0] * 5,
        staleness=[0, 0, 0, 0, 1],
    )
    _, metrics = summed(objective, tokens)
    assert "policy/staleness_0/rollout_train_kl" in metrics
    assert not [name for name in metrics if "staleness_1" in name], "its only token is not the policy's"


def test_a_service_recognises_each_metric_of_the_engines_logprobs_by_its_name():
    objective = replace(objective_of("use_kl_loss=false"), buckets=Buckets(last=1, versions_per_step=1))
    signals = {"logprobs": [-1.0] * 5, "old_logprobs": [-1.0] * 5, "advantages": [1.0] * 5, "staleness": [0] * 5}
    without = summed(objective, tokens_of(**signals))[1]
    more = summed(objective, tokens_of(**signals, rollout_logprobs=[-1.0] * 5))[1].keys() - without.keys()
    assert more and all(NEEDS_LOGPROBS in name for name in more), more
    assert not [name for name in without if NEEDS_LOGPROBS in name]
