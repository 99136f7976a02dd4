"""Logprobs that are kept until a request ends, and unpacked at once, are those that vLLM makes token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def step_of(rng: np.random.Generator, counts: list[int], num_logprobs: int) -> Any:
    """One step of a batch whose requests get these numbers of tokens, each with the likeliest tokens beside its own."""
    from vllm.v1.outputs import LogprobsLists

    tokens = sum(counts)
    starts = None if counts == [1] * len(counts) else [0, *np.cumsum(counts).tolist()]
    return LogprobsLists(
        rng.integers(0, 1000, (tokens, 1 + num_logprobs), dtype=np.int32),
        -rng.random((tokens, 1 + num_logprobs), dtype=np.float32),
        rng.integers(0, 1000, tokens, dtype=np.int32),
        starts,
    )


@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 3, 2]], ids=["one token each", "drafted tokens"])
def test_parts_of_steps_are_joined_as_vllms_slices(counts: list[int], num_logprobs: int):
    from skyrl_train.engines.vllm.scheduling.kept_logprobs import StepLogprobs, joined

    rng = np.random.default_rng(0)
    steps = [step_of(rng, counts, num_logprobs) for _ in range(4)] + [step_of(rng, [1, 1, 1], 0)] * (num_logprobs == 0)
    for index in range(len(counts)):
        of_step = [counts[index] if step.cu_num_generated_tokens else 1 for step in steps]
        parts: list[Any] = [
            StepLogprobs(step).slice_request(index, count) for step, count in zip(steps, of_step, strict=True)
        ]
        expected = [step.slice_request(index, count) for step, count in zip(steps, of_step, strict=True)]
        found = joined(parts)
        for n in range(3):
            wanted = np.concatenate([each[n] for each in expected])
            assert found[n].dtype == wanted.dtype and np.array_equal(found[n], wanted)


def test_a_neighbour_that_asks_for_more_logprobs_does_not_change_those_of_a_request():
    from skyrl_train.engines.vllm.scheduling.kept_logprobs import StepLogprobs, joined

    rng = np.random.default_rng(0)
    steps = [step_of(rng, [1, 1], num_logprobs) for num_logprobs in (2, 5, 2, 0, 0)]
    for first, last, asked in ((0, 3, 2), (2, 5, 0)):
        own = steps[first:last]
        parts: list[Any] = [StepLogprobs(step).slice_request(1, 1) for step in own]
        found = joined(parts)
        for n in range(2):
            assert np.array_equal(found[n], np.concatenate([step[n][1:2, : 1 + asked] for step in own]))
        assert np.array_equal(found[2], np.concatenate([step[2][1:2] for step in own]))


@pytest.mark.parametrize("num_logprobs", [0, 2])
@pytest.mark.parametrize("is_flat", [False, True])
def test_logprobs_unpacked_at_once_are_those_that_vllm_unpacks_token_by_token(
    num_logprobs: int, is_flat: bool, monkeypatch: pytest.MonkeyPatch
):
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from skyrl_train.engines.vllm.flat_logprobs import TOKEN_BY_TOKEN, unpack_at_once

    def processor() -> LogprobsProcessor:
        return LogprobsProcessor(None, create_sample_logprobs(is_flat), None, 0.0, num_logprobs, None)

    rng = np.random.default_rng(0)
    parts = [step_of(rng, [1] * count, max(num_logprobs, wider)) for count, wider in ((1, 0), (50, 0), (7, 3))]
    ours, theirs = processor(), processor()
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", TOKEN_BY_TOKEN)
    for part in parts:
        theirs._update_sample_logprobs(part)
    unpack_at_once()
    assert LogprobsProcessor._update_sample_logprobs is not TOKEN_BY_TOKEN
    for part in parts:
        ours._update_sample_logprobs(part)
    assert ours == theirs and len(list(ours.logprobs)) == 58
