"""TrainBatches with the prompts that a teacher reads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from skyrl_train.batching.hinted import HintedBatch, aligned, with_prompts
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import split
from skyrl_train.types import TeacherPrompt
from tests.cpu.batching.test_split import experience_of

LENGTHS = [7, 3, 12, 5, 9]
LIMITS = MicroBatchLimits(dp_size=2, max_tokens=40, max_sample_tokens=1000)
PROMPTS = [TeacherPrompt(2, torch.arange(1000 * n, 1000 * n + 6 * n)) for n in range(1, 6)]
"""The first two tokens of each sample are replaced by 6, 12, ... 30 others."""


def hinted(limits: MicroBatchLimits = LIMITS) -> tuple[list, list[HintedBatch]]:
    batches = split(experience_of(LENGTHS), limits, num_mini_batches=1)
    return batches, with_prompts(batches, PROMPTS, limits)


def test_each_response_follows_the_teachers_prompt_and_its_values_return_to_their_tokens():
    for batch, own in zip(*hinted(), strict=True):
        samples = torch.split(own.token_ids, own.cu_seqlens.diff().tolist())
        plain = torch.split(batch.token_ids, batch.cu_seqlens.diff().tolist())
        for sample, tokens, policy in zip(own.sample_ids.tolist(), samples, plain, strict=True):
            assert tokens.tolist() == [*PROMPTS[sample].token_ids.tolist(), *policy[2:].tolist()]
        back = aligned({"ids": own.token_ids, "twice": torch.stack([own.token_ids] * 2, 1)}, own)
        starts = batch.cu_seqlens[:-1].long()
        expected = batch.token_ids.clone()
        expected[torch.cat([starts, starts + 1])] = 0
        assert torch.equal(back["ids"], expected) and torch.equal(back["twice"][:, 1], expected)
        assert int(own.loss_mask.sum()) == int(batch.loss_mask.sum()) - len(samples)  # the second token is a prompt's


def test_micro_batches_hold_the_longer_samples_and_every_shard_has_equally_many():
    _, shards = hinted()
    assert len({len(own.mini_batches[0]) for own in shards}) == 1
    for own in shards:
        lengths = own.cu_seqlens.diff().tolist()
        (micro_batches,) = own.mini_batches
        assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths)))
        assert all(len(samples) < 2 or sum(lengths[i] for i in samples) <= 40 for samples in micro_batches)


def test_a_shard_without_samples_runs_empty_micro_batches():
    limits = replace(LIMITS, dp_size=7)
    _, shards = hinted(limits)
    (empty, *_) = (own for own in shards if not len(own.sample_ids))
    assert all(samples == () for samples in empty.mini_batches[0]) and len(empty.mini_batches[0]) >= 1
    assert {name: len(values) for name, values in aligned({"x": torch.zeros(0)}, empty).items()} == {"x": 0}


def test_a_sample_too_long_for_the_model_is_refused():
    with pytest.raises(ValueError, match=r"has 37 tokens with its hint: more than the 36 positions .* Shorten"):
        hinted(replace(LIMITS, max_sample_tokens=36))
