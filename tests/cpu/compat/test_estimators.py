"""Estimators of 0.4 against the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.credit import CreditInputs, advantages
from skyrl_train.algorithms.tables import ADVANTAGES
from skyrl_train.compat.estimators import Estimator
from skyrl_train.config import load_config
from tests.support.old_functions import registered

VALUES = load_config().trainer.algorithm.values
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
INPUTS = CreditInputs(
    rewards=torch.tensor([0, 0, 0.5, 0, 1, 0, 0.25, 0, 0.75, 0, 0, 2], dtype=torch.float64),
    loss_mask=MASK,
    cu_seqlens=torch.tensor([0, 5, 7, 9, 12], dtype=torch.int32),
    group_ids=torch.tensor([0, 0, 1, 1]),
)
"""Four samples: two turns, one turn, one without a trained token, and one whose prompt has one token."""


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    with registered():
        yield


def credited(name: str, **changes: Any) -> torch.Tensor:
    bound = bind(ADVANTAGES.resolve(name), VALUES | changes)
    return advantages(bound.function, INPUTS, bound.parameters)


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_of_0_4_gives_the_built_in_advantages(by_std: bool):
    old, native = (credited(name, grpo_norm_by_std=by_std) for name in ("old_grpo", "grpo"))
    assert torch.allclose(old[MASK], native[MASK], rtol=1e-5) and old[MASK].abs().min() > 0


def test_one_advantage_per_token_reaches_its_token():
    found = credited("old_returns", gamma=0.5)
    # From the first token of the policy: 0 + 0.5 * (0.5 + 0.5 * (0 + 0.5 * 1)), and so on.
    assert found[MASK].tolist() == [0.375, 0.75, 1.0, 0.25, 1.0, 2.0]


def test_a_sample_without_a_trained_token_keeps_its_reward_in_its_row():
    seen = {}

    def look(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
        seen.update(rewards=token_level_rewards.tolist(), mask=response_mask.tolist(), index=list(index))
        return token_level_rewards, None

    Estimator(look)(INPUTS, **VALUES)
    assert seen["rewards"] == [[0, 0.5, 0, 1], [0.25, 0, 0, 0], [0.75, 0, 0, 0], [0, 2, 0, 0]]
    assert seen["mask"] == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert seen["index"] == ["0", "0", "1", "1"]


def test_a_reward_before_the_first_trained_token_is_in_its_row():
    seen = {}

    def look(token_level_rewards: Any, response_mask: Any) -> Any:
        seen.update(rewards=token_level_rewards.tolist(), mask=response_mask.tolist())
        return token_level_rewards, None

    rewards = torch.tensor([0, 0.5, 0, 1, 0, 0.25, 0], dtype=torch.float64)
    mask = torch.tensor([0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)
    bounds = torch.tensor([0, 4, 7], dtype=torch.int32)
    Estimator(look)(CreditInputs(rewards, mask, bounds, torch.tensor([0, 0])), **VALUES)
    assert seen == {"rewards": [[0.5, 0, 1], [0.25, 0, 0]], "mask": [[1, 1, 1], [1, 1, 0]]}


def test_another_shape_is_an_error():
    with pytest.raises(ValueError, match="it must return advantages and returns of \\(4, 4\\)"):
        Estimator(lambda token_level_rewards: token_level_rewards.sum(-1))(INPUTS, **VALUES)
