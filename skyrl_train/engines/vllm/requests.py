"""Requests to vLLM's AsyncLLM in batches: token ids in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from vllm import SamplingParams as VllmSamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.engines.settings import room_to_answer
from skyrl_train.engines.stop_strings import has_special_token
from skyrl_train.engines.vllm.flat_logprobs import unpack_at_once
from skyrl_train.engines.vllm.versions import VersionTracker
from skyrl_train.types import Generation, SamplingParams, VersionSpans

Ended = tuple[CompletionOutput, VersionSpans]
Finished = list[tuple[int, Ended]]


class Requests:
    def __init__(self, llm: AsyncLLM, versions: VersionTracker, max_model_len: int, *, has_seeds: bool) -> None:
        """Args: has_seeds: use the seeds of requests."""
        unpack_at_once()
        self._llm, self._versions = llm, versions
        self._max_model_len, self._has_seeds = max_model_len, has_seeds
        self._ids = itertools.count()

    async def generate(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncGenerator[Finished, None]:
        """Yield the requests that finished since the last time; closing the generator aborts the rest."""
        results: asyncio.Queue[tuple[int, Ended | BaseException]] = asyncio.Queue()

        async def complete(index: int, token_ids: list[int], params: VllmSamplingParams) -> None:
            try:
                results.put_nowait((index, await self._complete(token_ids, params)))
            except Exception as error:  # raised by the reader of the queue
                results.put_nowait((index, error))

        prepared = [(index, ids, self._vllm_params(len(ids), params)) for index, ids, params in requests]
        tasks = [asyncio.create_task(complete(*request)) for request in prepared]
        left = len(tasks)
        try:
            while left:
                batch = [await results.get()]
                while not results.empty():
                    batch.append(results.get_nowait())
                left -= len(batch)
                finished: Finished = []
                for index, result in batch:
                    if isinstance(result, BaseException):
                        raise result
                    finished.append((index, result))
                yield finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        params = VllmSamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )

        async def score(token_ids: list[int]) -> list[float]:
            async for output in self._llm.generate(_prompt(token_ids), params, self._next_id()):
                rows = output.prompt_logprobs
                assert rows is not None and len(rows) == len(token_ids)
                pairs = zip(rows[1:], token_ids[1:], strict=True)
                return [0.0] + [row[token_id].logprob for row, token_id in pairs if row is not None]
            raise RuntimeError("the engine ended a request without an answer")

        return list(await asyncio.gather(*(score(token_ids) for token_ids in prompts)))

    def generation(self, ended: Ended) -> Generation:
        output, spans = ended
        token_ids = list(output.token_ids)
        logprobs = output.logprobs
        assert logprobs is not None and len(logprobs) == len(token_ids)
        return Generation(
            token_ids=token_ids,
            logprobs=list(logprobs.logprobs),
            text=self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True),
            stop_reason=_stop_reason(output),
            policy_version=min(version for version, _ in spans),
            version_spans=spans,
        )

    def close(self) -> None:
        # vLLM ends its processes with the last reference, which must not wait for the interpreter's end.
        del self._llm, self._versions

    async def _complete(self, token_ids: list[int], params: VllmSamplingParams) -> Ended:
        stream = self._versions.generate(_prompt(token_ids), params, self._next_id())
        async with contextlib.aclosing(stream) as outputs:
            async for output, spans in outputs:
                return output.outputs[0], spans[0]
        raise RuntimeError("the engine ended a request without an answer")

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _vllm_params(self, prompt_length: int, params: SamplingParams) -> VllmSamplingParams:
        room = room_to_answer(prompt_length, self._max_model_len)
        skips_special = not has_special_token(params.stop, self._llm.get_tokenizer())
        shared = _sampling_params(replace(params, seed=None), min(params.max_generate_length, room), skips_special)
        if params.seed is None or not self._has_seeds:
            return shared
        seeded = copy.copy(shared)
        seeded.seed = params.seed
        return seeded


@functools.lru_cache(maxsize=4096)
def _sampling_params(params: SamplingParams, max_tokens: int, skips_special: bool) -> VllmSamplingParams:
    """vLLM searches decoded text for stop strings; without them, decoding once at the end is cheaper."""
    return VllmSamplingParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=list(params.stop),
        include_stop_str_in_output=True,
        detokenize=bool(params.stop),
        skip_special_tokens=skips_special,
        logprobs=0,
        flat_logprobs=True,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _prompt(token_ids: list[int]) -> dict[str, object]:
    """A form that vLLM does not render."""
    return {"type": "token", "prompt_token_ids": token_ids}


def _stop_reason(output: CompletionOutput) -> str:
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"the engine ended a request with {output.finish_reason!r} ({output.stop_reason})")
    return output.finish_reason
