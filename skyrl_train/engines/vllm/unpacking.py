"""The front end takes a request's logprobs out of their arrays at once, where vLLM (0.26 to 0.33) goes token by token.

Requests of this project get theirs in one piece (whole_logprobs.py), and many requests end in the same step: 512 tokens
took 1 ms, for each of them, in the process that hands out the next requests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

Update = Callable[[LogprobsProcessor, LogprobsLists], None]


@functools.cache
def install() -> None:
    """Patch vLLM for all requests of this process that ask for flat logprobs of the sampled tokens alone."""
    LogprobsProcessor._update_sample_logprobs = at_once(LogprobsProcessor._update_sample_logprobs)


def at_once(one_by_one: Update) -> Update:
    """Return vLLM's method with all tokens of a step handled at once; more than one number per token stays vLLM's."""

    @functools.wraps(one_by_one)
    def update(processor: LogprobsProcessor, lists: LogprobsLists) -> None:
        flat = processor.logprobs
        if not isinstance(flat, FlatLogprobs) or processor.num_logprobs != 0 or processor.tokenizer is not None:
            one_by_one(processor, lists)
            return
        assert processor.cumulative_logprob is not None
        sampled = lists.logprobs[:, 0].tolist()
        start, end = len(flat.logprobs), len(flat.logprobs) + len(sampled)
        flat.start_indices += range(start, end)
        flat.end_indices += range(start + 1, end + 1)
        flat.token_ids += lists.logprob_token_ids[:, 0].tolist()
        flat.logprobs += sampled
        flat.ranks += lists.sampled_token_ranks.tolist()
        flat.decoded_tokens += [None] * len(sampled)
        # Not sum(), which rounds in another way from Python 3.12 on.
        processor.cumulative_logprob = functools.reduce(operator.add, sampled, processor.cumulative_logprob)

    return update
