"""Layers are cut into pipeline stages so that the costliest stage is as cheap as can be."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_train.hf.flops import matrix_weights
from skyrl_train.megatron.model.stages import layers_of_stages, megatron_layout


def greatest(costs: list[float], head: float, counts: tuple[int, ...] | list[int]) -> float:
    ends = list(itertools.accumulate(counts))
    sums = [sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    return max(*sums[:-1], sums[-1] + head)


@given(
    st.lists(st.integers(1, 20).map(float), min_size=2, max_size=8),
    st.integers(0, 40).map(float),
    st.data(),
)
def test_no_other_cut_has_a_cheaper_costliest_stage(costs: list[float], head: float, data: st.DataObject):
    stages = data.draw(st.integers(2, len(costs)))
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [[b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts]
    found = layers_of_stages(costs, head, stages)
    assert found in every
    assert greatest(costs, head, found) == min(greatest(costs, head, counts) for counts in every)


def test_equal_layers_without_an_output_layer_are_cut_evenly():
    assert layers_of_stages([1.0] * 36, 0.0, 4) == [9, 9, 9, 9]
    assert layers_of_stages([1.0] * 10, 0.0, 4) in ([3, 3, 2, 2], [2, 2, 3, 3], [2, 3, 3, 2], [2, 3, 2, 3])


def test_the_last_stage_of_qwen3_4b_has_fewer_layers_for_its_output_layer():
    config = SimpleNamespace(
        model_type="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
    )
    costs, head = matrix_weights(config)  # type: ignore[arg-type]
    assert costs == [2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728] * 36 and head == 2560 * 151_936
    assert layers_of_stages(costs, head, 2) == [20, 16]
    assert layers_of_stages(costs, head, 4) == [10, 10, 10, 6]


@given(st.integers(4, 40), st.floats(0, 20), st.integers(2, 4), st.integers(2, 3))
def test_no_other_cut_into_virtual_stages_gives_the_busiest_rank_less(
    layers: int, head: float, ranks: int, chunks: int
):
    assume(layers >= ranks * chunks)
    counts = layers_of_stages([1.0] * layers, head, ranks, chunks)
    assert sum(counts) == layers and min(counts) >= 1 and len(counts) == ranks * chunks
    work = [sum(counts[rank::ranks]) for rank in range(ranks)]
    # The last rank has n layers and the output layer, the others share the rest evenly.
    most = [max(n + head, -(-(layers - n) // (ranks - 1))) for n in range(chunks, layers - chunks * (ranks - 1) + 1)]
    assert max(*work[:-1], work[-1] + head) == min(most)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 pipeline stages"):
        layers_of_stages([1.0, 1.0], 1.0, 3)
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 pipeline stages"):
        layers_of_stages([1.0] * 3, 1.0, 2, 2)


def test_megatron_deals_chunks_of_virtual_stages_round():
    layout = megatron_layout([3, 2, 2, 1], 2)
    assert [[len(chunk) for chunk in rank] for rank in layout.layout] == [[4, 2], [2, 2]]
    layout.validate_layer_layout(num_layers=8, mtp_num_layers=None)
