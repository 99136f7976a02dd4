"""Samples end to end, padded, split over context-parallel ranks, and back."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skyrl_train.megatron.layers import attention
from skyrl_train.megatron.layers.attention import pack_params, packed_attention
from skyrl_train.megatron.layers.pack_tables import halves, index_tables, zigzag
from skyrl_train.megatron.passes.packing import MicroBatch, Packer, unpack
from skyrl_train.ranks import pad_multiple
from skyrl_train.types import TrainBatch

BATCH = TrainBatch(
    token_ids=torch.tensor([5, 6, 7, 8, 9, 10]),
    cu_seqlens=torch.tensor([0, 3, 5, 6], dtype=torch.int32),
    loss_mask=torch.tensor([False, True, True, False, True, False]),
    loss_weights={"token_mean": torch.tensor([0.0, 0.1, 0.2, 0.0, 0.3, 0.0])},
    signals={
        "rollout_logprobs": torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, 0.0]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 2.0]),
    },
    sample_ids=torch.tensor([0, 1, 2]),
    mini_batches=(((0, 1, 2),),),
)


def packer(multiple: int = 1, cp_rank: int = 0, cp_size: int = 1) -> Packer:
    return Packer(multiple, cp_rank, cp_size, torch.device("cpu"))


def test_targets_stand_where_they_are_predicted():
    packed = packer(multiple=4).pack(BATCH, (0, 1), {"old_logprobs": torch.tensor([0.0, -0.1, -0.2, 0.0, -0.3, 0.0])})
    assert packed.token_ids.tolist() == [[5, 6, 7, 0, 8, 9, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.is_token.tolist() == [True, True, True, False, True, True, False, False]
    assert packed.targets.labels.tolist() == [6, 7, 0, 0, 9, 0, 0, 0]
    assert packed.targets.loss_mask.tolist() == [True, True, False, False, True, False, False, False]
    torch.testing.assert_close(packed.targets.loss_weights["token_mean"], torch.tensor([0.1, 0.2, 0, 0, 0.3, 0, 0, 0]))
    assert packed.targets.sample.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and packed.targets.num_samples == 2
    signals = packed.targets.signals
    assert signals["rollout_logprobs"].tolist() == [-1, -2, 0, 0, -3, 0, 0, 0]
    assert signals["advantages"].tolist() == [1, 1, 0, 0, -1, 0, 0, 0]
    torch.testing.assert_close(signals["old_logprobs"], torch.tensor([-0.1, -0.2, 0, 0, -0.3, 0, 0, 0]))
    assert signals.keys() == {"rollout_logprobs", "advantages", "old_logprobs"}
    assert packed.packed.cu_seqlens_q.tolist() == [0, 3, 5]
    assert packed.packed.cu_seqlens_q_padded.tolist() == [0, 4, 8]


def test_unpacked_values_stand_at_their_tokens_and_first_tokens_have_none():
    packed = packer(multiple=4).pack(BATCH, (0, 1))
    values = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0])
    assert unpack(values, packed).tolist() == [0, 10, 11, 0, 14]


@pytest.mark.parametrize("samples", [(0, 1, 2), (2, 0), (1,), (2,)])
@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_unpacking_reverses_packing(samples: tuple[int, ...], multiple: int):
    packed = packer(multiple).pack(BATCH, samples)
    tokens = unpack(packed.targets.labels, packed)
    expected = BATCH.token_ids[packed.token_slice].clone()
    expected[packed.source == packed.token_ids.shape[1]] = 0
    assert torch.equal(tokens, expected)
    assert len(tokens) == int(BATCH.cu_seqlens.diff()[list(samples)].sum())


def test_a_micro_batch_without_samples_is_padding_without_targets():
    packed = packer(multiple=4).pack(BATCH, ())
    assert packed.token_ids.shape == (1, 4) and len(packed.token_slice) == 0
    assert not packed.is_token.any() and not packed.targets.loss_mask.any()
    assert len(unpack(torch.zeros(4), packed)) == 0


def test_the_zig_zag_gives_each_rank_an_early_and_a_late_chunk():
    assert zigzag([8], 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag([8], 1, 2).tolist() == [2, 3, 4, 5]
    assert zigzag([4, 8], 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag([6], 2, 3).tolist() == [2, 3]


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_context_parallel_ranks_hold_every_token_once(cp_size: int):
    whole = packer(2 * cp_size).pack(BATCH, (0, 1, 2))
    parts: list[MicroBatch] = [packer(2 * cp_size, rank, cp_size).pack(BATCH, (0, 1, 2)) for rank in range(cp_size)]
    places = torch.cat([part.local for part in parts if part.local is not None])
    assert sorted(places.tolist()) == list(range(whole.token_ids.shape[1]))
    for part in parts:
        assert torch.equal(part.token_ids, whole.token_ids[:, part.local])
        assert torch.equal(part.targets.labels, whole.targets.labels[part.local])


def test_samples_are_padded_for_sequence_and_context_parallelism():
    assert pad_multiple(1, 1) == 1
    assert pad_multiple(2, 1) == 2
    assert pad_multiple(1, 2) == 4
    assert pad_multiple(2, 4) == 16


def one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention of each sample by itself."""
    bounds = [0, *itertools.accumulate(lengths)]
    outs = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True))
    return torch.cat([out[0].transpose(0, 1) for out in outs])


@pytest.mark.parametrize("lengths", [[1], [4, 4], [1, 2, 3, 5, 8, 13, 64, 65], [33, 1, 32]])
def test_packed_attention_is_the_attention_of_each_sample(lengths: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_world_size", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query, key = torch.randn(total, 4, 8, generator=generator), torch.randn(total, 2, 8, generator=generator)
    value = torch.randn(total, 2, 6, generator=generator)
    packed = pack_params(lengths, lengths, torch.device("cpu"), cp_rank=0, cp_size=1)
    out = packed_attention(query, key, value, packed, 0.3)
    torch.testing.assert_close(out, one_by_one(query, key, value, lengths), rtol=1e-5, atol=1e-6)


def one_after_the_other(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor], _: tuple[int, int], scale: float
) -> Tensor:
    """What FlashAttention computes: the last query of a sample is at its last key."""
    outs = []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(one.tolist()) for one in bounds), strict=True):
        q, k, v = query[q0:q1].transpose(0, 1), key[k0:k1].transpose(0, 1), value[k0:k1].transpose(0, 1)
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_the_halves_of_the_context_parallel_ranks_are_the_attention_of_each_sample(cp_size: int):
    lengths = [2 * cp_size * n for n in (1, 5, 2)]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query, key = torch.randn(total, 4, 8, generator=generator), torch.randn(total, 2, 8, generator=generator)
    value = torch.randn(total, 2, 8, generator=generator)
    expected = one_by_one(query, key, value, lengths)
    order = [zigzag(lengths, rank, cp_size) for rank in range(cp_size)]
    gathered = torch.cat(order)
    for rank, mine in enumerate(order):
        both = halves(lengths, rank, cp_size)
        out = attention.attend_halves(query[mine], key[gathered], value[gathered], both, 0.3, flash=one_after_the_other)
        torch.testing.assert_close(out, expected[mine], rtol=1e-5, atol=1e-6)


def test_rectangles_waste_less_than_half():
    lengths = torch.randint(1, 300, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    buckets, scatter = index_tables(lengths, 0, 1)
    assert sum(bucket.queries.numel() for bucket in buckets) < 2 * sum(lengths)
    assert sorted(scatter.tolist()) == sorted(set(scatter.tolist()))
