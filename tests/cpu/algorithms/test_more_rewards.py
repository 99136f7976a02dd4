"""Estimators that read several rewards of a sample, or the reward of a greedy response."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.credit import CreditInputs, advantages
from skyrl_train.algorithms.tables import ADVANTAGES
from skyrl_train.batching.build import build_experience, credit_inputs
from skyrl_train.types import Group, Prompt, Sample, final_reward

GDPO: dict[str, Any] = {"grpo_norm_by_std": True, "gdpo_reward_weights": {}}


def inputs(named: dict[str, list[float]], mask: list[bool] | None = None, **changes: Any) -> CreditInputs:
    """Two groups of two samples of one token."""
    return CreditInputs(
        rewards=changes.get("rewards", torch.zeros(4, dtype=torch.float64)),
        loss_mask=torch.tensor(mask or [True] * 4),
        cu_seqlens=torch.arange(5, dtype=torch.int32),
        group_ids=torch.tensor([0, 0, 1, 1]),
        named_rewards={name: torch.tensor(values, dtype=torch.float64) for name, values in named.items()},
        baselines=changes.get("baselines"),
    )


def credit(name: str, given: CreditInputs, parameters: dict[str, Any]) -> list[float]:
    bound = bind(ADVANTAGES[name], parameters)
    return advantages(bound.function, given, bound.parameters).tolist()


def test_gdpo_scales_each_reward_by_its_own_spread():
    # Each reward gives +-1/sqrt(2) in its group, whatever its size: sums sqrt(2), -sqrt(2), 0, 0, and then the
    # standard deviation of the four, sqrt(4/3).
    named = {"format": [0.1, 0.0, 1.0, 0.0], "correct": [100.0, 0.0, 0.0, 50.0]}
    expected = [3**0.5 / 2**0.5, -(3**0.5) / 2**0.5, 0.0, 0.0]
    assert credit("gdpo", inputs(named), GDPO) == pytest.approx(expected, abs=1e-4)


def test_gdpo_weighs_the_rewards_and_a_weight_without_a_reward_counts_as_0(caplog: pytest.LogCaptureFixture):
    named = {"format": [1.0, 0.0, 1.0, 0.0], "correct": [0.0, 1.0, 0.0, 1.0]}
    assert credit("gdpo", inputs(named), GDPO) == [0.0] * 4
    weighted = credit("gdpo", inputs(named), GDPO | {"gdpo_reward_weights": {"correct": 2.0}})
    assert weighted == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2, abs=1e-5)
    for _ in range(2):
        assert credit("gdpo", inputs(named), GDPO | {"gdpo_reward_weights": {"corect": 2.0}}) == [0.0] * 4
    (warning,) = caplog.messages
    assert "names corect, which no sample of a step has: its rewards are format, correct" in warning
    with pytest.raises(ValueError, match="no sample has named ones"):
        credit("gdpo", inputs({}), GDPO)


def test_gdpo_of_equal_and_of_extreme_rewards_is_finite():
    assert credit("gdpo", inputs({"a": [0.7] * 4, "b": [0.1] * 4}), GDPO) == [0.0] * 4
    assert credit("gdpo", inputs({"a": [1e30, -1e30, 0.0, 1e-30]}), GDPO) == pytest.approx(
        [0.75**0.5 * 2**0.5, -(0.75**0.5) * 2**0.5, 0.0, 0.0], abs=1e-4
    )


def test_gdpo_leaves_samples_without_a_trained_token_out_of_the_last_normalisation():
    named = {"a": [1.0, 0.0, 1.0, 0.0]}
    found = credit("gdpo", inputs(named, mask=[True, True, False, False]), GDPO)
    assert found[:2] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_remax_subtracts_the_greedy_reward_from_the_return():
    given = inputs({}, rewards=torch.tensor([1.0, 0.0, 0.5, 2.0]), baselines=torch.tensor([1.0, 1.0, 0.25, 0.25]))
    assert credit("remax", given, {}) == [0.0, -1.0, 0.25, 1.75]
    turns = replace(given, cu_seqlens=torch.tensor([0, 3, 4]), group_ids=torch.tensor([0, 1]))
    turns = replace(turns, baselines=torch.tensor([1.0, 0.0]))
    assert credit("remax", turns, {}) == [0.5, -0.5, -0.5, 2.0]
    with pytest.raises(ValueError, match="remax needs a greedy response"):
        credit("remax", inputs({}), {})


def test_a_batch_has_named_rewards_and_the_greedy_reward_of_each_group():
    def sample(reward: float, **named: float) -> Sample:
        ids, mask = torch.tensor([1, 2]), torch.tensor([False, True])
        return Sample(ids, mask, torch.zeros(2), 1, final_reward(2, reward), "stop", 1, 0, named_rewards=named)

    prompt = Prompt("0", [], "addition", {}, "sums")
    groups = [
        Group(prompt, (sample(1.0, a=1.0), sample(0.0, a=0.5, b=2.0)), (sample(0.25), sample(0.5))),
        Group(prompt, (sample(0.0),), (replace(sample(0.25), ends_conversation=False), sample(0.75))),
    ]
    found = credit_inputs(build_experience(groups, 0))
    assert {name: values.tolist() for name, values in found.named_rewards.items()} == {
        "a": [1.0, 0.5, 0.0],
        "b": [0.0, 2.0, 0.0],
    }
    assert found.baselines is not None
    assert found.baselines.tolist() == [0.375, 0.375, 1.0], "the mean of two conversations, the sum of one's rewards"
    assert build_experience([groups[0], replace(groups[1], greedy=())], 0).baselines is None
