"""Losses of 0.4 against the built-in ones: terms, gradients and metrics, however samples are packed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.inputs import LossTerms, PerSample, TokenInputs
from skyrl_train.algorithms.tables import LOSSES
from skyrl_train.checks.rl import check
from skyrl_train.compat.losses import PolicyLoss, algorithm_config, reduce_loss
from skyrl_train.compat.registries import PolicyLossRegistry, register_policy_loss, registering_modules
from skyrl_train.config import ConfigError, load_config
from tests.support.old_functions import registered

VALUES = load_config().trainer.algorithm.values
SAMPLES = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
"""A reply between two turns, padding after a sample, and a sample without a trained token."""


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    with registered():
        yield


def tokens(mask: Tensor = MASK) -> TokenInputs:
    random = torch.Generator().manual_seed(0)
    old, rollout, advantages = (torch.randn(len(SAMPLES), generator=random) for _ in range(3))
    logprobs = (old + 0.4 * torch.randn(len(SAMPLES), generator=random)).requires_grad_()
    signals = {"old_logprobs": old, "rollout_logprobs": rollout, "advantages": advantages}
    return TokenInputs(logprobs, mask, PerSample(SAMPLES, 3, mask), signals)


def called(name: str, inputs: TokenInputs, **changes: Any) -> LossTerms:
    terms: LossTerms = bind(LOSSES.resolve(name), VALUES | changes)(inputs)
    return terms


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_terms_that_end_in_reduce_loss_are_those_of_the_built_in_loss_bit_for_bit(reduction: str):
    inputs = tokens()
    old, native = (called(name, inputs, loss_reduction=reduction) for name in ("old_clip", "regular"))
    assert torch.equal(old.terms[MASK], native.terms[MASK])
    weights = torch.rand(len(SAMPLES)) * MASK
    gradients = [torch.autograd.grad((each.terms * weights).sum(), inputs.logprobs)[0] for each in (old, native)]
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
    share = native.metrics["clip_ratio"].values[MASK].mean()
    assert torch.allclose(old.metrics["clip_ratio"].values, share)


def test_each_of_several_reductions_keeps_its_factor():
    inputs = tokens()
    terms = called("old_two_parts", inputs).terms
    expected = -inputs.logprobs * inputs.advantages - 0.25 * inputs.logprobs
    assert torch.allclose(terms[MASK], expected[MASK], atol=1e-7)
    gradient = torch.autograd.grad(terms[MASK].sum(), inputs.logprobs)[0]
    assert torch.allclose(gradient[MASK], (-inputs.advantages - 0.25)[MASK])


def test_a_loss_that_reduces_by_itself_counts_by_the_weights_of_its_micro_batch(monkeypatch: pytest.MonkeyPatch):
    warned: list[str] = []
    monkeypatch.setattr("skyrl_train.compat.losses._warned", set())
    monkeypatch.setattr("skyrl_train.compat.losses.log.warning", lambda text, *values: warned.append(text % values))
    inputs, of_all = tokens(), 10  # trained tokens of the mini-batch, 4 of them here
    terms = called("old_mean", inputs).terms
    loss = (terms * MASK / of_all).sum()
    expected = -(inputs.logprobs * inputs.advantages)[MASK].sum() / of_all
    assert torch.allclose(loss, expected)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    assert torch.allclose(gradient[MASK], -inputs.advantages[MASK] / of_all)
    called("old_mean", inputs)
    assert len(warned) == 1 and "the policy loss mean does not reduce with reduce_loss" in warned[0]


def test_a_micro_batch_without_a_trained_token_has_no_gradient_and_the_names_of_all_metrics():
    inputs = tokens(torch.zeros_like(MASK))
    terms = called("old_clip", inputs)
    assert terms.metrics.keys() == {"clip_ratio"}
    (gradient,) = torch.autograd.grad(terms.terms.sum(), inputs.logprobs)
    assert not gradient.any()


def test_responses_are_rows_from_the_left_with_their_masks():
    seen: dict[str, Tensor] = {}

    def look(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Any) -> Any:
        seen.update(log_probs=log_probs, mask=loss_mask)
        return reduce_loss(log_probs, loss_mask, config.loss_reduction), {}

    inputs = tokens()
    PolicyLoss(look)(inputs, **VALUES)
    assert seen["mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert torch.equal(seen["log_probs"][0], inputs.logprobs[1:5]) and seen["log_probs"][1, 1:].tolist() == [0, 0, 0]


PROGRAM = """
from functools import partial
from old_library import estimator, loss
from skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_advantage_estimator

PolicyLossRegistry.register("of_a_library", loss)
PolicyLossRegistry.register("a_part", partial(loss, sign=2))
register_advantage_estimator("of_a_library")(estimator)
"""
LIBRARY = """
def loss(log_probs, old_log_probs, advantages, config, loss_mask=None, *, sign=1):
    return sign * log_probs.sum(), {}

def estimator(token_level_rewards, response_mask, index):
    return token_level_rewards, None
"""


def test_the_module_that_registers_is_imported_by_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "old_library.py").write_text(LIBRARY)
    (tmp_path / "old_program.py").write_text(PROGRAM)
    program = importlib.import_module("old_program")
    assert registering_modules() == ["tests.support.old_functions", "old_program"]
    importlib.reload(program)  # as where a main program is also imported by its name
    terms = [called(name, tokens()).terms[MASK] for name in ("of_a_library", "a_part")]
    assert torch.equal(2 * terms[0], terms[1])
    with pytest.raises(ValueError, match="a_part is already registered"):
        PolicyLossRegistry.register("a_part", partial(program.loss, sign=3))


def test_another_reduction_than_the_configured_one_is_an_error_before_the_run():
    @register_policy_loss("old_other_reduction")
    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Any) -> Any:
        return reduce_loss(-log_probs * advantages, loss_mask, "sequence_mean"), {}

    with pytest.raises(
        ConfigError, match=r"the policy loss reduces by sequence_mean. Set loss_reduction=sequence_mean"
    ):
        check(load_config(["trainer.algorithm.policy_loss_type=old_other_reduction"]), None, files=False)
    settings = [
        "trainer.algorithm.policy_loss_type=old_other_reduction",
        "trainer.algorithm.loss_reduction=sequence_mean",
    ]
    check(load_config(settings), None, files=False)


def test_parts_of_responses_are_refused_before_the_run_and_in_it():
    settings = ["trainer.algorithm.policy_loss_type=old_clip", "trainer.policy.megatron_config.context_parallel_size=2"]
    with pytest.raises(ConfigError, match="context_parallel_size is 2: old_clip reads complete responses"):
        check(load_config(settings), None, files=False)
    inputs: Any = tokens()
    part = replace(inputs, per_sample=replace(inputs.per_sample, group=object()))
    with pytest.raises(ValueError, match="needs complete responses"):
        called("old_clip", part)


def test_settings_have_the_sections_of_the_configuration_and_the_users_own_values():
    seen = []

    def look(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any) -> Any:
        seen.append((config.sapo.tau_pos, config.eps_clip_low, config.own))
        return log_probs.sum(), {}

    PolicyLoss(look)(tokens(), **VALUES, own=3)
    assert seen == [(VALUES["tau_pos"], VALUES["eps_clip_low"], 3)]


def test_keys_with_one_name_in_two_sections_are_in_their_sections():
    config: Any = algorithm_config(load_config(["trainer.algorithm.kl_ctrl.type=adaptive"]).trainer.algorithm.values)
    assert config.kl_ctrl.type == "adaptive" and config.dynamic_sampling.type is None
    assert "type" not in config and "tau_pos" not in config and "parameters" not in config


def test_a_module_of_the_configuration_gets_the_longest_length_like_a_program():
    keys = ["trainer.custom_modules=[tests.support.old_functions]", "generator.max_input_length=64"]
    changes = ["generator.sampling_params.max_generate_length=32", "trainer.algorithm.policy_loss_type=old_clip"]
    algorithm = load_config([*keys, *changes]).trainer.algorithm
    assert algorithm_config(algorithm.values).max_seq_len == 96
    assert load_config([*keys, changes[0]]).trainer.algorithm.parameters == {}


def test_names_of_0_4_cannot_be_taken_and_other_built_in_names_can():
    with pytest.raises(ValueError, match="gspo is already registered"):
        PolicyLossRegistry.register("gspo", len)
    native = LOSSES["reinforce"]
    PolicyLossRegistry.register("reinforce", len)
    assert LOSSES["reinforce"] is not native and PolicyLossRegistry.get("reinforce") is len
    with pytest.raises(ValueError, match="reinforce is already registered"):
        PolicyLossRegistry.register("reinforce", max)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("token_mean", 2.0), ("sequence_mean", (1.5 + 3) / 2), ("seq_mean_token_sum_norm", (3 / 10 + 3 / 10) / 2)],
)
def test_outside_of_a_loss_reduce_loss_reduces(reduction: str, expected: float):
    loss, mask = torch.tensor([[1.0, 2, 9], [3, 9, 9]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    assert reduce_loss(loss, mask, reduction, 10).item() == pytest.approx(expected)
