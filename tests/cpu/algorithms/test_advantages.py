import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.advantages.gae import gae
from skyrl_train.algorithms.advantages.groups import grpo, rloo
from skyrl_train.algorithms.advantages.reinforce import reinforce_plus_plus
from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.credit import CreditInputs, advantages, assign_credit, per_sample, whitened
from skyrl_train.algorithms.inputs import needs
from skyrl_train.algorithms.tables import ADVANTAGES

IDS = torch.tensor([7, 7, 7, 7, 2, 2])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0])
OF_REWARDS = [name for name in ADVANTAGES if name not in ("gae", "remax")]
"""Estimators that read neither values nor a greedy response."""


# Two samples of one prompt, of three and two tokens; the first token of each is the prompt.
INPUTS = CreditInputs(
    rewards=torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25], dtype=torch.float64),
    loss_mask=torch.tensor([False, True, True, False, True]),
    cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
    group_ids=torch.tensor([0, 0]),
)


def estimator(name, norm_by_std=True):
    """f(rewards, group_ids) of samples that have one token and one named reward each."""
    bound = bind(ADVANTAGES[name], {"grpo_norm_by_std": norm_by_std, "gamma": 1.0, "gdpo_reward_weights": {}})

    def of_samples(rewards, group_ids):
        size = len(rewards)
        trained = torch.ones(size, dtype=torch.bool)
        bounds, named = torch.arange(size + 1, dtype=torch.int32), {"sum": rewards.double()}
        inputs = CreditInputs(rewards.double(), trained, bounds, group_ids, named_rewards=named)
        return advantages(bound.function, inputs, bound.parameters)

    return of_samples


rewards_and_ids = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=40)


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    # Group 7: mean 0.5, variance 4 * 0.25 / 3; group 2: mean 2, variance 2.
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    expected = torch.tensor([a, -a, -a, a, b, -b])
    torch.testing.assert_close(grpo(REWARDS, IDS, grpo_norm_by_std=True), expected, rtol=1e-7, atol=0)


def test_grpo_without_std_subtracts_the_group_mean():
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0])
    assert torch.equal(grpo(REWARDS, IDS, grpo_norm_by_std=False), expected)


def test_rloo_subtracts_the_mean_of_the_other_samples():
    # 1 - 1/3, 0 - 2/3, ...; 3 - 1, 1 - 3.
    expected = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0])
    torch.testing.assert_close(rloo(REWARDS, IDS), expected, rtol=1e-7, atol=0)


def test_reinforce_plus_plus_normalises_returns_over_all_trained_tokens():
    # Returns of the trained tokens: 0.75, 0.5 and 0.25; mean 0.5, variance 2 * 0.0625 / 2.
    s = 0.25 / math.sqrt(0.0625 + 1e-8)
    expected = torch.tensor([s, s, 0.0, -s, -s])
    torch.testing.assert_close(advantages(reinforce_plus_plus, INPUTS, {"gamma": 1.0}), expected, rtol=1e-7, atol=0)


def test_reinforce_plus_plus_discounts_later_rewards_per_trained_token():
    inputs = CreditInputs(
        rewards=torch.tensor([0.0, 1.0, 0.0, 4.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, False, True]),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        group_ids=torch.tensor([0]),
    )
    returns = torch.tensor([1.5, 3.0, 4.0, 4.0], dtype=torch.float64)  # 0 + (1 + 4 / 2) / 2, 1 + 4 / 2, 4, 4
    trained = returns[inputs.loss_mask]
    expected = ((returns - trained.mean()) / trained.var().add(1e-8).sqrt()).float()
    torch.testing.assert_close(advantages(reinforce_plus_plus, inputs, {"gamma": 0.5}), expected)


@pytest.mark.parametrize("name", OF_REWARDS)
@pytest.mark.parametrize("norm_by_std", [True, False])
@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 33))
def test_equal_rewards_give_exactly_zero(name, norm_by_std, reward, size):
    estimate = estimator(name, norm_by_std)
    assert torch.equal(estimate(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)), torch.zeros(size))


@pytest.mark.parametrize("name", OF_REWARDS)
@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_equal_rewards_of_uneven_samples_give_exactly_zero(name, reward, lengths):
    """In float64 the mean of three rewards of 0.7 is not 0.7."""
    bound = bind(ADVANTAGES[name], {"grpo_norm_by_std": True, "gamma": 1.0, "gdpo_reward_weights": {}})
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    rewards = torch.zeros(sum(lengths), dtype=torch.float64)
    rewards[bounds[1:].long() - 1] = reward
    ids, trained = torch.zeros(len(lengths), dtype=torch.int64), torch.ones(len(rewards), dtype=torch.bool)
    named = {"sum": torch.full((len(lengths),), reward, dtype=torch.float64)}
    inputs = CreditInputs(rewards, trained, bounds, ids, named_rewards=named)
    assert not advantages(bound.function, inputs, bound.parameters).any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_sample_gets_no_advantage(name):
    alone, worse, better = estimator(name)(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1])).tolist()
    assert alone == 0 and worse < 0 < better


@pytest.mark.parametrize("name", OF_REWARDS)
@settings(deadline=None)
@given(rows=rewards_and_ids, seed=st.integers(0, 100))
def test_advantages_follow_their_samples_when_these_are_permuted(name, rows, seed):
    rewards = torch.tensor([r for r, _ in rows])
    ids = torch.tensor([i for _, i in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    permuted = estimator(name)(rewards[order], ids[order])
    torch.testing.assert_close(permuted, estimator(name)(rewards, ids)[order], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@settings(deadline=None)
@given(rows=rewards_and_ids)
def test_advantages_of_a_group_sum_to_zero(name, rows):
    rewards = torch.tensor([r for r, _ in rows])
    ids = torch.tensor([i for _, i in rows])
    estimates = estimator(name, norm_by_std=False)(rewards, ids)
    for group in ids.unique():
        assert abs(float(estimates[ids == group].double().sum())) < 1e-4


def test_advantages_are_float32_for_every_input_dtype():
    assert grpo(REWARDS.double(), IDS, grpo_norm_by_std=True).dtype == torch.float32


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\(6,\).*\(5,\)"):
        grpo(REWARDS, IDS[:5], grpo_norm_by_std=True)


def test_an_unknown_name_is_answered_with_the_nearest_valid_one():
    with pytest.raises(ValueError, match=r"advantage_estimator is gpro: did you mean grpo\? It must be one of grpo"):
        ADVANTAGES.resolve("gpro")


def test_an_estimator_of_samples_gets_sums_of_rewards_and_its_numbers_reach_every_token():
    assert advantages(grpo, INPUTS, {"grpo_norm_by_std": False}).tolist() == [0.25, 0.25, 0.25, -0.25, -0.25]


def test_an_estimator_of_tokens_sees_where_each_reward_was_earned():
    def reward_to_go(inputs):
        parts = torch.split(inputs.rewards, inputs.cu_seqlens.diff().tolist())
        return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])

    assert advantages(reward_to_go, INPUTS, {}).tolist() == [0.75, 0.75, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), r"wrong returned \(3,\): it must return a tensor of shape \(2,\)"),
        (1.0, r"wrong returned float: it must return a tensor of shape \(2,\)"),
        (torch.tensor([0.0, math.nan]), "wrong returned a number that is not finite"),
    ],
)
def test_what_is_no_advantage_is_refused(result, message):
    @per_sample
    def wrong(rewards, group_ids):
        return result

    with pytest.raises(ValueError, match=message):
        advantages(wrong, INPUTS, {})


# A sample of two turns with an observation between, one whose last token is the environment's, one without a turn.
TURNS = CreditInputs(
    rewards=torch.tensor([0, 0, 1, 0, 0, 2, 0, 0, 3, 5], dtype=torch.float64),
    loss_mask=torch.tensor([False, True, True, False, True, True, False, True, False, False]),
    cu_seqlens=torch.tensor([0, 6, 9, 10], dtype=torch.int32),
    group_ids=torch.tensor([0, 0, 1]),
    signals={"values": torch.tensor([9.0, 0.5, 0.25, 9.0, 1.0, 0.75, 9.0, 2.0, 9.0, 9.0])},
)


def test_gae_skips_the_environments_tokens_and_a_reward_there_counts_for_the_token_before():
    # gamma 0.5, lambda 0.5. Deltas: 0 + .125 - .5, 1 + .5 - .25, 0 + .375 - 1, 2 - .75; and 3 - 2.
    late = -0.625 + 0.25 * 1.25
    middle = 1.25 + 0.25 * late
    estimated = [-0.375 + 0.25 * middle, middle, late, 1.25, 1.0]
    result, mask = gae(TURNS, gamma=0.5, lambd=0.5), TURNS.loss_mask
    returns = torch.tensor(estimated, dtype=torch.float64) + TURNS.signals["values"][mask].double()
    torch.testing.assert_close(result.returns[mask], returns, rtol=0, atol=1e-15)
    expected = torch.tensor(estimated, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    torch.testing.assert_close(result.advantages[mask], expected, rtol=1e-14, atol=0)
    assert not result.returns[~mask].any() and not result.advantages[~mask].any()


def test_gae_with_gamma_and_lambda_of_one_is_the_rest_of_the_rewards_less_the_value():
    result, mask = gae(TURNS, gamma=1.0, lambd=1.0), TURNS.loss_mask
    assert result.returns[mask].tolist() == [3, 3, 2, 2, 3]
    less = result.returns - TURNS.signals["values"].double()
    torch.testing.assert_close(result.advantages[mask], whitened(less, mask)[mask], rtol=1e-14, atol=0)


def test_gae_of_a_step_without_a_trained_token_is_zero():
    inputs = replace(TURNS, loss_mask=torch.zeros(10, dtype=torch.bool))
    result = assign_credit(gae, inputs, {"gamma": 1.0, "lambd": 0.9})
    assert not result.advantages.any() and result.returns is not None and not result.returns.any()


def test_an_estimator_that_reads_values_must_also_return_returns():
    only = needs("values")(lambda inputs: inputs.rewards)
    with pytest.raises(ValueError, match="returned 1 values: expected AdvantagesAndReturns, because it reads values"):
        assign_credit(only, TURNS, {})
