"""Logprobs of sampled tokens are unpacked all at once.

vLLM's front end (0.26 to 0.33) unpacks them token by token. Here those of a request come together when it ends
(scheduling/scheduler.py), and the engine has nothing to do while those of the last responses are unpacked
(benchmarks/studies/logprob_traffic.py).
"""

from __future__ import annotations

import functools
import operator

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

TOKEN_BY_TOKEN = LogprobsProcessor._update_sample_logprobs
"""vLLM's own."""


def unpack_at_once() -> None:
    """Replace a method of vLLM by one with the same results, for the requests of a run; others keep vLLM's."""

    def update(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        own = self.logprobs
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(own, FlatLogprobs):
            TOKEN_BY_TOKEN(self, logprobs_lists)
            return
        token_ids, values, ranks = logprobs_lists[:3]
        logprobs, num_before = values[:, 0].tolist(), len(own.logprobs)
        own.start_indices += range(num_before, num_before + len(logprobs))
        own.end_indices += range(num_before + 1, num_before + 1 + len(logprobs))
        own.token_ids += token_ids[:, 0].tolist()
        own.logprobs += logprobs
        own.ranks += ranks.tolist()
        own.decoded_tokens += [None] * len(logprobs)
        self.cumulative_logprob = functools.reduce(operator.add, logprobs, self.cumulative_logprob)

    LogprobsProcessor._update_sample_logprobs = update  # type: ignore[method-assign]
