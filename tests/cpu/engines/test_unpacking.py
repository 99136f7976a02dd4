"""Logprobs taken out of their arrays at once, beside vLLM's own way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.logprobs import create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from skyrl_train.engines.vllm.unpacking import at_once

ONE_BY_ONE = LogprobsProcessor._update_sample_logprobs
AT_ONCE = at_once(ONE_BY_ONE)


def processor(num_logprobs: int, flat: bool) -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=None,
        logprobs=create_sample_logprobs(flat),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=None,
    )


def arrays(draw: np.random.Generator, num_tokens: int, width: int) -> LogprobsLists:
    return LogprobsLists(
        draw.integers(0, 1000, (num_tokens, width)).astype(np.int32),
        -draw.random((num_tokens, width), np.float32),
        draw.integers(1, 1000, num_tokens).astype(np.int32),
    )


def types(values: Any) -> set[type]:
    return {type(value) for value in values}


@pytest.mark.parametrize(
    ("num_logprobs", "width", "flat"),
    [(0, 1, True), (0, 3, True), (0, 1, False), (2, 3, True)],
    ids=["drawn tokens", "drawn tokens of a wider batch", "not flat", "others too"],
)
def test_arrays_taken_out_at_once_leave_what_vllm_does(num_logprobs: int, width: int, flat: bool):
    draw = np.random.default_rng(0)
    expected, found = processor(num_logprobs, flat), processor(num_logprobs, flat)
    for num_tokens in (1, 700, 0, 3):
        part = arrays(draw, num_tokens, width)
        ONE_BY_ONE(expected, part)
        AT_ONCE(found, part)
    assert found == expected
    assert len(found.logprobs or ()) == 704 and type(found.cumulative_logprob) is float
    if flat:
        kept: Any = found.logprobs
        assert types(kept.logprobs) == {float} and types(kept.token_ids) == types(kept.ranks) == {int}
        assert kept[703] == expected.logprobs[703] and kept[5:9] == expected.logprobs[5:9]  # type: ignore[index]
