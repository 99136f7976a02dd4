"""Weights that controllers change between steps, and their state in checkpoints."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from skyrl_train.algorithms.controllers import adapted_entropy_coef, adapted_kl_coef
from skyrl_train.config import load_config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.trainer.credit import Coefficients
from skyrl_train.trainer.from_config import objective
from skyrl_train.trainer.run_state import RunState
from skyrl_train.types import ExperienceBatch

REWARD = ["use_kl_loss=false", "use_kl_in_reward=true", "kl_loss_coef=0.1"]
ADAPTIVE_KL = [*REWARD, "kl_ctrl.type=adaptive", "kl_ctrl.kl_target=0.5", "kl_ctrl.horizon=20"]
ADAPTIVE_ENTROPY = ["use_entropy_loss=true", "entropy_loss_coef=0", "adaptive_entropy.target_entropy=0.3"]


def algorithm(overrides: list[str]) -> AlgorithmConfig:
    return load_config([f"trainer.algorithm.{override}" for override in overrides]).trainer.algorithm


def experience(mask: list[bool]) -> ExperienceBatch:
    """Three samples of two, two and one tokens."""
    zeros = torch.zeros(5)
    return ExperienceBatch(
        token_ids=zeros.long(),
        cu_seqlens=torch.tensor([0, 2, 4, 5], dtype=torch.int32),
        loss_mask=torch.tensor(mask),
        group_ids=torch.tensor([0, 0, 1]),
        rollout_logprobs=zeros,
        staleness=zeros.int(),
        rewards=zeros.double(),
    )


KL = torch.tensor([0.2, 0.4, 1.1, 9.0, 9.0])


def test_the_kl_weight_moves_towards_its_target_and_by_at_most_a_fifth_per_horizon():
    # Samples with a trained token: 0.3 and 1.1, mean 0.7; error 0.4 counts as 0.2, two samples of a horizon of 20.
    coefficients = Coefficients(algorithm(ADAPTIVE_KL))
    metrics = coefficients.after_penalty(experience([True, True, True, False, False]), KL)
    assert metrics == pytest.approx({"loss/avg_kl": 0.7, "loss/kl_loss_coef": 0.1})
    assert coefficients.kl == pytest.approx(0.1 * (1 + 0.2 * 2 / 20))
    assert adapted_kl_coef(0.1, 0.45, kl_target=0.5, horizon=20, num_samples=10) == pytest.approx(0.095)
    assert adapted_kl_coef(0.1, 0.0, kl_target=0.5, horizon=1, num_samples=1) == pytest.approx(0.08)
    assert adapted_kl_coef(0.1, 0.0, kl_target=0.5, horizon=1, num_samples=6) == pytest.approx(0.08), "never negative"


def test_a_fixed_weight_and_a_step_without_a_trained_token_change_nothing():
    fixed = Coefficients(algorithm(REWARD))
    assert fixed.after_penalty(experience([True] * 5), KL)["loss/kl_loss_coef"] == 0.1
    assert fixed.kl == 0.1 and fixed.state == {}
    adaptive = Coefficients(algorithm(ADAPTIVE_KL))
    assert adaptive.after_penalty(experience([False] * 5), KL)["loss/avg_kl"] == 0 and adaptive.kl == 0.1


def test_the_entropy_weight_rises_below_the_target_and_falls_above_it():
    config = load_config([f"trainer.algorithm.{override}" for override in ADAPTIVE_ENTROPY])
    coefficients = Coefficients(config.trainer.algorithm)
    whole = objective(config.trainer.algorithm, config.generator.sampling_params)
    used = []
    for entropy in (0.1, 0.2, 0.5, 0.5, 0.5):
        own = coefficients.objective(whole)
        assert own is not None
        (term,) = (term for term in own.terms if term.name == "entropy")
        used.append(term.coef)
        assert coefficients.after_update({"policy/policy_entropy": entropy}) == {"policy/entropy_loss_coef": term.coef}
    assert used == pytest.approx([0.0, 0.005, 0.01, 0.005, 0.0])
    before = coefficients.state
    assert coefficients.after_update({}) and coefficients.state == before, "no token of the first mini-batch is trained"
    assert adapted_entropy_coef(0.001, 1.0, target_entropy=0.5, delta=0.005) == 0
    constant = Coefficients(algorithm(["use_entropy_loss=true"]))
    assert constant.objective(whole) is None and constant.after_update({}) == {}


def test_a_resumed_run_continues_with_the_saved_weights():
    adaptive = [*ADAPTIVE_KL, *ADAPTIVE_ENTROPY]
    first, second = (Coefficients(algorithm(adaptive)) for _ in range(2))
    first.after_penalty(experience([True] * 5), KL)
    first.after_update({"policy/policy_entropy": 0.0})
    state = RunState(1, 1, False, {}, 1, {}, "", {}, coefficients=first.state)
    second.resume(RunState(**dataclasses.asdict(state)).coefficients)
    assert second.state == first.state != Coefficients(algorithm(adaptive)).state
    older = RunState(1, 1, False, {}, 1, {}, "", {})
    second.resume(older.coefficients)
    assert second.state == first.state
