"""Selections of tokens by a statistic of the whole mini-batch, against constants computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.objective import Bound
from skyrl_train.algorithms.selection import (
    MiniBatch,
    covariance_within,
    highest_covariance,
    highest_entropy,
    largest,
    selected,
)
from skyrl_train.algorithms.tables import CORRECTIONS, LOSSES

SELECTIONS = {
    "clip_cov": bind(covariance_within, {"clip_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}),
    "kl_cov": bind(highest_covariance, {"kl_cov_frac": 0.3}),
    "top_entropy": bind(highest_entropy, {"top_entropy_quantile": 0.3}),
}


def mini_batch(lengths: list[int], advantages: list[float], logprobs: list[float], **values: Any) -> MiniBatch:
    mask = torch.tensor(values.get("mask", [True] * len(logprobs)))
    old = {
        "old_logprobs": torch.tensor(logprobs),
        "old_entropy": torch.tensor(values.get("entropy", [0.0] * len(logprobs))),
    }
    ids = torch.tensor(values.get("ids", list(range(len(logprobs)))))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return MiniBatch(ids, bounds, mask, torch.tensor(advantages), old)


def test_covariance_is_relative_to_the_means_over_the_trained_tokens():
    # Means over the first four: A 0, log p -2; the products are 1, 1, -1, -1 and the masked token does not count.
    batch = mini_batch([5], [1.0, -1.0, 1.0, -1.0, 9.0], [-1.0, -3.0, -3.0, -1.0, 9.0], mask=[True] * 4 + [False])
    found = bind(highest_covariance, {"kl_cov_frac": 1.0})(batch)
    assert found.tolist() == [True, True, False, False, False]
    bounds = {"clip_ratio": 1.0, "clip_cov_lb": -2.0, "clip_cov_ub": 0.0}
    assert bind(covariance_within, bounds)(batch).tolist() == [False, False, True, True, False]


def test_at_least_one_token_is_selected_and_tokens_of_equal_value_together():
    batch = mini_batch([4], [2.0, 1.0, -1.0, -2.0], [-1.0, -2.0, -3.0, -4.0], entropy=[0.1, 0.5, 0.5, 0.2])
    assert bind(highest_covariance, {"kl_cov_frac": 0.0})(batch).tolist() == [True, False, False, True]
    assert bind(highest_entropy, {"top_entropy_quantile": 0.0})(batch).tolist() == [False, True, True, False]
    assert bind(highest_entropy, {"top_entropy_quantile": 1.0})(batch).all()


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_nothing_is_selected_where_nothing_is_trained_or_nothing_varies(selection: Bound):
    masked = mini_batch([3], [1.0, 2.0, 3.0], [-1.0, -2.0, -9.0], mask=[False] * 3)
    assert not selection(masked).any()
    if selection.function is not highest_entropy:
        assert not selection(mini_batch([2, 1], [0.0] * 3, [-1.0, -2.0, -3.0])).any()


def test_extreme_values_are_selected_without_overflow():
    batch = mini_batch([4], [1e4, -1e4, 0.0, 1.0], [0.0, -1e4, -1.0, -1e4])
    assert bind(highest_covariance, {"kl_cov_frac": 0.5})(batch).tolist() == [True, True, False, False]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_order_of_the_samples_does_not_change_the_selection(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    total = sum(lengths)
    numbers = st.lists(st.integers(-3, 3), min_size=total, max_size=total)
    advantages, logprobs, entropy, ids = (torch.tensor(data.draw(numbers)) for _ in range(4))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    order = data.draw(st.permutations(range(len(lengths))))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    moved = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])

    def batch_in(tokens: torch.Tensor, sizes: list[int]) -> MiniBatch:
        old = {"old_logprobs": logprobs[tokens].float(), "old_entropy": entropy[tokens].float()}
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).int()
        return MiniBatch(ids[tokens], cu_seqlens, mask[tokens], advantages[tokens].float(), old)

    own, other = batch_in(torch.arange(total), lengths), batch_in(moved, [lengths[i] for i in order])
    for selection in SELECTIONS.values():
        # Sums of float64 in another order may differ in the last bit: then tokens at the bound may too.
        assert (selection(own)[moved] != selection(other)).sum() <= _near_bound(own, selection)


def _near_bound(batch: MiniBatch, selection: Bound) -> int:
    """Tokens whose covariance is 0 or equals another's up to rounding; integers make these common."""
    if selection.function is highest_entropy:
        return 0
    factors = [batch.advantages.double(), batch.signals["old_logprobs"].double()]
    trained = [values - values[batch.loss_mask].mean() for values in factors]
    covariance = (trained[0] * trained[1])[batch.loss_mask]
    gaps = (covariance[:, None] - covariance[None]).abs() < 1e-9
    is_near = (gaps.sum(1) > 1) | (covariance.abs() < 1e-9) | ((covariance - 9).abs() < 1e-9)
    return int(is_near.sum())


def test_a_random_choice_depends_on_the_sample_and_not_on_its_position():
    bounds = {"clip_ratio": 0.25, "clip_cov_lb": -99.0, "clip_cov_ub": 99.0}
    first, second = list(range(10)), list(range(20, 30))
    values = ([1.0] * 10 + [-1.0] * 10, [-1.0] * 20)
    found = bind(covariance_within, bounds)(mini_batch([10, 10], *values, ids=first + second))
    swapped = bind(covariance_within, bounds)(mini_batch([10, 10], *values, ids=second + first))
    assert found.sum() == 5
    assert torch.equal(found[:10], swapped[10:]) and torch.equal(found[10:], swapped[:10])


def test_largest_takes_all_if_there_are_too_few():
    assert largest(torch.tensor([1.0, 2.0]), torch.tensor([False, True]), 5).tolist() == [False, True]


def test_a_selection_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="must return one bool for each of its tokens"):
        selected([Bound(lambda batch: torch.ones(2))], mini_batch([1], [0.0], [0.0]))


def test_terms_of_selected_tokens():
    from tests.cpu.algorithms.test_losses import VALUES, inputs

    old, advantages = torch.full((3,), -1.0, dtype=torch.float64), torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    logprobs = old + torch.tensor([0.1, 0.1, -0.1], dtype=torch.float64)
    ratios = (logprobs - old).exp()
    chosen = torch.tensor([True, False, True])
    tokens = inputs(logprobs, old, advantages, selected_by_covariance_within=chosen, selected_by_highest_entropy=chosen)
    assert bind(LOSSES["clip_cov"], VALUES)(tokens).terms.tolist() == pytest.approx([0.0, -float(ratios[1]), 0.0])
    assert bind(CORRECTIONS["top_entropy"], VALUES)(tokens).factor.tolist() == [1.0, 0.0, 1.0]
    tokens = inputs(logprobs, old, advantages, selected_by_highest_covariance=chosen)
    expected = (-ratios * advantages + torch.tensor([0.1, 0.0, 0.1])).tolist()
    assert bind(LOSSES["kl_cov"], VALUES)(tokens).terms.tolist() == pytest.approx(expected)
