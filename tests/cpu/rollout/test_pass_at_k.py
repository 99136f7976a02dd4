"""pass@k is the mean over all subsets of k samples, with the error that repeating the evaluation shows."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import fmean, stdev

import pytest

from skyrl_train.rollout.pass_at_k import estimate, pass_at_k, pass_rates, shown_sizes


def test_pass_at_k_has_the_hand_computed_values():
    assert pass_at_k(4, 1, 1) == 1 / 4 and pass_at_k(4, 1, 2) == 1 - 3 / 6 and pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 5, 1) == 1.0


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_of_k_samples_with_one_that_passed(n: int):
    for c in range(n + 1):
        passed = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(fmean(any(some) for some in combinations(passed, k)))


def test_it_is_unbiased_where_counting_the_first_k_of_n_would_waste_samples():
    """In expectation over all outcomes of n samples that each pass with probability p: 1 - (1 - p) ** k."""
    n, p = 6, 0.3
    for k in (1, 2, 4, 6):
        expected = sum(
            p ** sum(bits) * (1 - p) ** (n - sum(bits)) * pass_at_k(n, sum(bits), k)
            for number in range(2**n)
            for bits in [[number >> i & 1 for i in range(n)]]
        )
        assert expected == pytest.approx(1 - (1 - p) ** k)


def test_sizes_are_powers_of_two_and_the_number_of_samples():
    assert [list(shown_sizes(n)) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_rates_of_two_prompts_have_the_hand_computed_values_and_errors():
    rates = pass_rates([[True, False], [False, False]])
    # pass@1: 1/2 and 0; deviation from the mean 1/4 each: sqrt(2 / 16 / 1) / sqrt(2) = 1/4.
    assert (rates[1].value, rates[1].standard_error) == (0.25, pytest.approx(0.25))
    # pass@2: 1 and 0.
    assert (rates[2].value, rates[2].standard_error) == (0.5, pytest.approx(0.5))


def test_a_prompt_with_fewer_samples_counts_for_the_sizes_that_it_has():
    rates = pass_rates([[True, False, False, False], [True]])
    assert rates[1].value == (1 / 4 + 1) / 2 and rates[4].value == 1.0
    assert rates[4].standard_error is None, "there is one prompt with 4 samples"


def test_the_standard_error_is_the_spread_of_repeated_evaluations():
    """200 prompts whose probabilities differ, 4 samples each, evaluated 400 times with other prompts and samples."""
    chance = random.Random(1)

    def evaluated() -> tuple[float, float]:
        odds = [chance.random() ** 2 for _ in range(200)]
        rate = pass_rates([[chance.random() < p for _ in range(4)] for p in odds])[2]
        assert rate.standard_error is not None
        return rate.value, rate.standard_error

    values, errors = zip(*(evaluated() for _ in range(400)), strict=True)
    assert stdev(values) == pytest.approx(fmean(errors), rel=0.1)
    # E[1 - (1 - u ** 2) ** 2] = 2/3 - 1/5 for uniform u.
    assert fmean(values) == pytest.approx(2 / 3 - 1 / 5, abs=4 * fmean(errors) / 20)


def test_a_single_value_has_no_error():
    assert estimate([0.5]).standard_error is None
