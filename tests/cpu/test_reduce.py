"""Merging of per-rank metrics, against values computed by hand and against the one-process value."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.tracking.reduce import Stat, max_of, mean_of, min_of, reduce_metrics, sum_of

finite = st.floats(min_value=-1e6, max_value=1e6)


def test_each_kind_is_merged_by_what_it_is():
    ranks = [
        {"tokens": sum_of(10), "kl": mean_of(3.0, 10), "longest": max_of(7), "shortest": min_of(2)},
        {"tokens": sum_of(30), "kl": mean_of(1.0, 30), "longest": max_of(5), "shortest": min_of(4)},
    ]
    assert reduce_metrics(ranks) == {"tokens": 40, "kl": 0.1, "longest": 7, "shortest": 2}


def test_mean_weighs_tokens_not_ranks():
    # Rank means are 1.0 (one token) and 0.0 (99 tokens); their plain average would be 0.5.
    assert reduce_metrics([{"x": mean_of(1.0, 1)}, {"x": mean_of(0.0, 99)}]) == {"x": 0.01}


def test_rank_without_a_metric_adds_nothing_to_it():
    assert reduce_metrics([{"x": mean_of(2.0, 4)}, {}]) == {"x": 0.5}


def test_rank_without_tokens_adds_nothing_to_a_mean():
    assert reduce_metrics([{"x": mean_of(2.0, 4)}, {"x": mean_of(0.0, 0)}]) == {"x": 0.5}


def test_mean_of_nothing_is_nan():
    assert math.isnan(reduce_metrics([{"x": mean_of(0.0, 0)}])["x"])


@pytest.mark.parametrize("make", [sum_of, max_of, min_of, lambda value: mean_of(value, 1)])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_of_one_rank_is_never_hidden(make, values):
    assert math.isnan(reduce_metrics([{"x": make(value)} for value in values])["x"])


def test_infinities_of_both_signs_are_nan_and_do_not_raise():
    assert math.isnan(reduce_metrics([{"x": sum_of(math.inf)}, {"x": sum_of(-math.inf)}])["x"])


def test_parts_of_different_kinds_are_an_error_that_names_the_metric():
    with pytest.raises(ValueError, match="metric policy/kl: .*max, sum"):
        reduce_metrics([{"policy/kl": sum_of(1)}, {"policy/kl": max_of(1)}])


def test_negative_weight_is_an_error():
    with pytest.raises(ValueError, match="-2"):
        mean_of(1.0, -2)


@given(st.lists(st.tuples(finite, st.integers(0, 100)), min_size=1), st.randoms())
def test_value_does_not_depend_on_the_order_of_the_ranks(parts: list[tuple[float, int]], random):
    stats: list[dict[str, Stat]] = [{"mean": mean_of(v, w), "sum": sum_of(v)} for v, w in parts]
    shuffled = stats.copy()
    random.shuffle(shuffled)
    first, second = reduce_metrics(stats), reduce_metrics(shuffled)
    assert first["sum"] == second["sum"]
    assert first["mean"] == second["mean"] or (math.isnan(first["mean"]) and math.isnan(second["mean"]))


@given(st.lists(finite, min_size=1), st.integers(1, 5))
def test_merged_ranks_equal_one_process(values: list[float], num_ranks: int):
    shards = [values[rank::num_ranks] for rank in range(num_ranks)]
    ranks = [{"mean": mean_of(math.fsum(s), len(s)), "max": max_of(max(s, default=-math.inf))} for s in shards]
    merged = reduce_metrics(ranks)
    assert merged["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-9)
    assert merged["max"] == max(values)
