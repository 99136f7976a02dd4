import pytest
import torch

from skyrl_train.megatron.layers.pack_tables import zigzag
from skyrl_train.megatron.layers.rope import packed_positions


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_positions_restart_in_each_sample():
    assert packed_positions(bounds([3, 1, 2]), 6, 0, 1).tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_positions_are_those_of_the_tokens_that_the_rank_holds(cp_size):
    lengths = [2 * cp_size * n for n in (1, 3, 2)]
    whole = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(cp_size):
        held = whole[zigzag(lengths, rank, cp_size)]
        assert torch.equal(packed_positions(bounds(lengths), len(held), rank, cp_size), held)
