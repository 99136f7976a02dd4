"""Which version of the weights drew which tokens of a request, also of one that goes on after a weight sync."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.engines.vllm.compat import TELLS_VERSIONS, version_starts
from skyrl_train.types import VersionSpans

Starts = list[tuple[int, int]]
"""(version, number of tokens that were drawn before its first), in order."""


class VersionTracker:
    """Knows the versions of the tokens of every request of one engine.

    vLLM tells them from 0.32 on. For older ones the tokens that each running request has are counted when the weights
    change: the engine is paused then, and all that it drew before has come out.
    """

    def __init__(self, llm: AsyncLLM, *, native: bool = TELLS_VERSIONS) -> None:
        """Args: native=False counts also where vLLM would tell."""
        self._llm, self._native = llm, native
        self._numbers = itertools.count()
        self._starts: dict[str, dict[int, Starts]] = {}
        """Request that runs -> index of its completion -> versions, of those that the weights changed under."""
        self.policy_version = 0

    def move_to(self, policy_version: int) -> None:
        """To be called while the engine is paused, when the new weights are in place."""
        for state in self._llm.output_processor.request_states.values():
            changes = self._starts.get((state.parent_req or state).external_req_id)
            if changes is not None and state.detokenizer is not None:
                drawn = state.detokenizer.num_output_tokens()
                starts = changes.setdefault(state.request_index, [(self.policy_version, 0)])
                if starts[-1][1] == drawn:  # the last version drew nothing
                    starts.pop()
                starts.append((policy_version, drawn))
        self.policy_version = policy_version

    def close(self) -> None:
        del self._llm  # as in Requests.close

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **arguments: Any
    ) -> AsyncGenerator[tuple[RequestOutput, dict[int, VersionSpans]], None]:
        """What `AsyncLLM.generate` yields, each with the spans of those of its completions that end with it, by index.

        Closing the generator aborts the request.
        """
        if not self._native:
            request_id = f"{request_id}~{next(self._numbers)}"  # clients may choose ids, and one of them twice
            self._starts[request_id] = {}
        drawn: dict[int, int] = {}
        try:
            async with contextlib.aclosing(self._llm.generate(prompt, params, request_id, **arguments)) as outputs:
                async for output in outputs:
                    ended: dict[int, VersionSpans] = {}
                    for one in output.outputs:
                        before = drawn.get(one.index, 0) if params.output_kind == RequestOutputKind.DELTA else 0
                        drawn[one.index] = before + len(one.token_ids)
                        if one.finish_reason is not None:
                            ended[one.index] = self._spans(request_id, one, drawn[one.index])
                    yield output, ended
        finally:
            self._starts.pop(request_id, None)

    def _spans(self, request_id: str, output: CompletionOutput, num_tokens: int) -> VersionSpans:
        starts = version_starts(output) if self._native else self._starts[request_id].get(output.index)
        return spans_of(starts or [(self.policy_version, 0)], num_tokens)


def spans_of(starts: Sequence[tuple[int, int]], num_tokens: int) -> VersionSpans:
    """(version, number of its tokens) in order. A stop string takes back tokens, and may take a whole version.

    An answer without a token has one span, of the version that it ended with.
    """
    bounds = [min(start, num_tokens) for _, start in starts] + [num_tokens]
    spans = [(version, bounds[n + 1] - bounds[n]) for n, (version, _) in enumerate(starts)]
    return tuple(span for span in spans if span[1] > 0) or ((starts[-1][0], 0),)
