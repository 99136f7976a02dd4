"""Policy versions that generated the tokens of a request, also of one that continues after a weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.engines.vllm.compat import REPORTS_VERSIONS, version_starts
from skyrl_train.types import VersionSpans

Starts = list[tuple[int, int]]
"""(version, index of its first token), in order."""


class VersionTracker:
    """Tracks the versions of all requests of one engine.

    vLLM reports them from 0.32 on. For older versions, the tokens of each running request are counted when the weights
    change: the engine is paused then, and has output all its tokens.
    """

    def __init__(self, llm: AsyncLLM, *, native: bool = REPORTS_VERSIONS) -> None:
        """Args: native: use vLLM's own report."""
        self._llm, self._native = llm, native
        self._numbers = itertools.count()
        self._starts: dict[str, dict[int, Starts]] = {}
        """Running request -> index of its completion -> versions, if the weights changed while it ran."""
        self.policy_version = 0

    async def move_to(self, policy_version: int) -> None:
        """To be called while the engine is paused, after the new weights were loaded."""
        while not self._native and not self._llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)  # tokens of the old weights that are not counted yet
        for state in self._llm.output_processor.request_states.values():
            changes = self._starts.get((state.parent_req or state).external_req_id)
            if changes is not None and state.detokenizer is not None:
                num_tokens = state.detokenizer.num_output_tokens()
                starts = changes.setdefault(state.request_index, [(self.policy_version, 0)])
                if starts[-1][1] == num_tokens:  # the last version generated nothing
                    starts.pop()
                starts.append((policy_version, num_tokens))
        self.policy_version = policy_version

    def close(self) -> None:
        del self._llm  # as in Requests.close

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **arguments: Any
    ) -> AsyncGenerator[tuple[RequestOutput, dict[int, VersionSpans]], None]:
        """Yield the outputs of `AsyncLLM.generate`, each with the spans of the completions that it finishes, by index.
        Closing the generator aborts the request.
        """
        if not self._native:
            request_id = f"{request_id}~{next(self._numbers)}"  # clients may choose ids, and repeat one
            self._starts[request_id] = {}
        num_tokens: dict[int, int] = {}
        try:
            async with contextlib.aclosing(self._llm.generate(prompt, params, request_id, **arguments)) as outputs:
                async for output in outputs:
                    ended: dict[int, VersionSpans] = {}
                    for completion in output.outputs:
                        index, is_delta = completion.index, params.output_kind == RequestOutputKind.DELTA
                        before = num_tokens.get(index, 0) if is_delta else 0
                        num_tokens[index] = before + len(completion.token_ids)
                        if completion.finish_reason is not None:
                            ended[index] = self._spans(request_id, completion, num_tokens[index])
                    yield output, ended
        finally:
            self._starts.pop(request_id, None)

    def _spans(self, request_id: str, output: CompletionOutput, num_tokens: int) -> VersionSpans:
        starts = version_starts(output) if self._native else self._starts[request_id].get(output.index)
        return spans_of(starts or [(self.policy_version, 0)], num_tokens)


def spans_of(starts: Sequence[tuple[int, int]], num_tokens: int) -> VersionSpans:
    """(version, number of its tokens) in order. A stop string removes tokens, and may remove a version. An answer
    without tokens has one span, of the version that it ended with.
    """
    bounds = [min(start, num_tokens) for _, start in starts] + [num_tokens]
    spans = [(version, bounds[n + 1] - bounds[n]) for n, (version, _) in enumerate(starts)]
    return tuple(span for span in spans if span[1] > 0) or ((starts[-1][0], 0),)
