import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages import (
    ADVANTAGES,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
)
from skyrl_train.algorithms.choice import choose

IDS = torch.tensor([7, 7, 7, 7, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0])
rewards_and_ids = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=40)


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    # Group 7: mean 0.5, variance 4 * 0.25 / 3; group 2: mean 2, variance 2.
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    expected = torch.tensor([a, -a, -a, a, b, -b])
    torch.testing.assert_close(grpo_advantages(REWARDS, IDS, norm_by_std=True), expected, rtol=1e-7, atol=0)


def test_grpo_without_std_subtracts_the_group_mean():
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0])
    assert torch.equal(grpo_advantages(REWARDS, IDS, norm_by_std=False), expected)


def test_rloo_subtracts_the_mean_of_the_other_samples():
    # 1 - 1/3, 0 - 2/3, ...; 3 - 1, 1 - 3.
    expected = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0])
    torch.testing.assert_close(rloo_advantages(REWARDS, IDS, norm_by_std=True), expected, rtol=1e-7, atol=0)


def test_reinforce_plus_plus_normalises_over_all_samples():
    # Mean 1; squared deviations 0, 1, 1, 0, 4, 0; variance 6 / 5.
    s = 1 / (math.sqrt(1.2) + 1e-6)
    expected = torch.tensor([0.0, -s, -s, 0.0, 2 * s, 0.0])
    torch.testing.assert_close(
        reinforce_plus_plus_advantages(REWARDS, IDS, norm_by_std=True), expected, rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("norm_by_std", [True, False])
@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 33))
def test_equal_rewards_give_exactly_zero(name, norm_by_std, reward, size):
    advantages = ADVANTAGES[name](
        torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), norm_by_std=norm_by_std
    )
    assert torch.equal(advantages, torch.zeros(size))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_sample_gets_no_advantage(name):
    advantages = ADVANTAGES[name](torch.tensor([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1]), norm_by_std=True)
    assert advantages[0] == 0 and advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None)
@given(rows=rewards_and_ids, seed=st.integers(0, 100))
def test_advantages_follow_their_samples_when_these_are_permuted(name, rows, seed):
    rewards = torch.tensor([r for r, _ in rows])
    ids = torch.tensor([i for _, i in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    advantages = ADVANTAGES[name](rewards, ids, norm_by_std=True)
    permuted = ADVANTAGES[name](rewards[order], ids[order], norm_by_std=True)
    torch.testing.assert_close(permuted, advantages[order], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@settings(deadline=None)
@given(rows=rewards_and_ids)
def test_advantages_of_a_group_sum_to_zero(name, rows):
    rewards = torch.tensor([r for r, _ in rows])
    ids = torch.tensor([i for _, i in rows])
    advantages = ADVANTAGES[name](rewards, ids, norm_by_std=False)
    for group in ids.unique():
        assert abs(float(advantages[ids == group].double().sum())) < 1e-4


def test_advantages_are_float32_for_every_input_dtype():
    assert grpo_advantages(REWARDS.double(), IDS, norm_by_std=True).dtype == torch.float32


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(6,\).*\(5,\)"):
        grpo_advantages(REWARDS, IDS[:5], norm_by_std=True)


def test_an_unknown_name_is_answered_with_the_nearest_valid_one():
    with pytest.raises(ValueError, match='advantage_estimator is "gpro".*Did you mean "grpo"'):
        choose(ADVANTAGES, "gpro", "trainer.algorithm.advantage_estimator")
