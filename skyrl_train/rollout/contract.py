"""Contract of a rollout, which `generator.rollout` names as `module:function`."""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING

from skyrl_train.faults import short
from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import Generate, Generation, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import Config
    from skyrl_train.data.chat import ChatTemplate


class RolloutFailure(RuntimeError):
    """A rollout failed; the message names it and its prompt. `__cause__` is the original error, if there is one."""


class GenerationAborted(RolloutFailure):
    """An engine aborted a generation again and again without generating a token."""


MAX_ABORTS = 8
"""Aborts in a row without a token after which a generation is given up."""


class Requests:
    """Requests of all rollouts that the engines have not answered, and when a rollout last moved."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, others: Requests | None = None) -> None:
        """Args: others: those of rollouts that share the engines, whose answers are progress of requests that wait."""
        self._clock, self._sent_s, self._others = clock, dict[object, float](), others
        self._moved_s = clock()

    def __len__(self) -> int:
        return len(self._sent_s)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest was sent; 0 without any."""
        return self._clock() - min(self._sent_s.values(), default=self._clock())

    @property
    def quiet_s(self) -> float:
        """Seconds since a request was last answered, or `note_progress` called."""
        own_s = self._clock() - self._moved_s
        return own_s if self._others is None or not self._sent_s else min(own_s, self._others.quiet_s)

    def note_progress(self) -> None:
        """To be called when something else ends that rollouts wait for, such as an environment's call."""
        self._moved_s = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request as waiting during the body."""
        key = object()
        self._sent_s[key] = self._clock()
        try:
            with nullcontext() if self._others is None else self._others.waiting():
                yield
            self.note_progress()
        finally:
            del self._sent_s[key]


class Engines:
    """Engines, tokenizer and chat template for one rollout.

    Each rollout gets its own object, which counts its requests: each has a seed derived from the rollout's.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatTemplate,
        *,
        max_input_length: int,
        max_turns: int,
        config: Config | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._generate = generate
        self.tokenizer = tokenizer
        self.chat = chat
        """Messages to token ids: `prompt_ids(messages)`, and `reply_ids(written, messages)` after a response."""
        self.max_input_length = max_input_length
        """Maximum number of tokens of a request (`generator.max_input_length`)."""
        self.max_turns = max_turns
        """`generator.max_turns`, for rollouts that have turns."""
        self.vocab_size = vocab_size
        """Tokens of the policy's vocabulary; None if unknown."""
        self._config = config
        self._num_requests = 0
        self.requests = Requests()
        """Shared by all rollouts."""
        self.error: Exception | None = None
        """Error of the engines themselves, which ends the run and not just the rollout."""

    @property
    def config(self) -> Config:
        """The run's configuration; `config.extra` holds the user's own values."""
        assert self._config is not None, "built without a configuration"
        return self._config

    def for_a_rollout(self, prompt: Prompt) -> Engines:
        """A new object for one rollout, whose chat template has the tools and variables of the prompt's row."""
        engines = copy.copy(self)
        engines.chat = self.chat.for_row(prompt.extras)
        engines._num_requests, engines.error = 0, None
        return engines

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, route_key: str
    ) -> Generation:
        """Sample a response. Requests with the same route key reach the same engine, which caches their prefix.

        A response that a weight sync aborts (generator.pause_mode=abort) continues from its tokens with the new
        weights; with stop strings, of which the cut could hide one, it starts again.

        Raises: ValueError for arguments that no engine can answer, and for more tokens than `max_input_length`;
            GenerationAborted; errors of the engines.
        """
        prompt_token_ids = self._checked(prompt_token_ids, sampling_params)
        if len(prompt_token_ids) > self.max_input_length:
            raise ValueError(
                f"a request has {len(prompt_token_ids)} tokens, more than generator.max_input_length "
                f"{self.max_input_length}. Shorten it, or raise the limit"
            )
        number, self._num_requests = self._num_requests, self._num_requests + 1
        try:
            with self.requests.waiting():
                parts = await self._parts(prompt_token_ids, seeded(sampling_params, number), route_key)
        except Exception as error:
            self.error = error
            raise
        if parts[-1].stop_reason == "abort":
            raise GenerationAborted(f"the engine aborted turn {number + 1} of a sample of prompt {route_key}")
        return parts[0] if len(parts) == 1 else self._joined(parts)

    def _checked(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The ids as Python's integers."""
        given = None if isinstance(token_ids, list) and token_ids else short(token_ids)
        kinds = set() if given else set(map(type, token_ids))
        if any(not issubclass(kind, Integral) or kind is bool for kind in kinds):
            given = f"a list that holds {', '.join(sorted(kind.__name__ for kind in kinds))}"
        if given:
            raise ValueError(
                f"engines.generate got {given} as prompt_token_ids: it must be a list of at least one token id. Use "
                "engines.chat.prompt_ids(messages) for messages, engines.tokenizer(text)['input_ids'] for text, and "
                ".tolist() for a tensor or an array"
            )
        ids, size = [*map(int, token_ids)] if kinds != {int} else token_ids, self.vocab_size
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or (size is not None and highest >= size):
            raise ValueError(
                f"engines.generate got token id {lowest if lowest < 0 else highest} in prompt_token_ids: ids are those "
                f"of the policy's tokenizer, from 0{'' if size is None else f' to {size - 1}'}"
            )
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"engines.generate got {short(params)} as sampling_params: it must be a SamplingParams. Pass those of "
                "the rollout, or dataclasses.replace(sampling_params, max_generate_length=...)"
            )
        return ids

    async def _parts(self, prompt_token_ids: list[int], params: SamplingParams, route_key: str) -> list[Generation]:
        """The parts of one response; the last is aborted only if it was aborted MAX_ABORTS times without a token."""
        parts: list[Generation] = []
        token_ids: list[int] = []
        aborts = 0
        while True:
            left = replace(params, max_generate_length=params.max_generate_length - len(token_ids))
            rest = seeded(left, "continued", len(token_ids)) if token_ids else left
            part = await self._generate(prompt_token_ids + token_ids, rest, route_key)
            aborts = aborts + 1 if part.stop_reason == "abort" and not part.token_ids else 0
            if part.token_ids or part.stop_reason != "abort" or aborts == MAX_ABORTS:
                parts.append(part)
            if part.stop_reason != "abort" or aborts == MAX_ABORTS:
                return parts
            token_ids = token_ids + part.token_ids
            if params.stop:
                parts, token_ids = [], []
            elif len(token_ids) == params.max_generate_length:
                parts[-1] = replace(part, stop_reason="length")
                return parts

    def _joined(self, parts: Sequence[Generation]) -> Generation:
        token_ids = [token for part in parts for token in part.token_ids]
        spans = [part.version_spans or ((part.policy_version, len(part.token_ids)),) for part in parts]
        return Generation(
            token_ids=token_ids,
            logprobs=[logprob for part in parts for logprob in part.logprobs],
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True),
            stop_reason=parts[-1].stop_reason,
            policy_version=min(part.policy_version for part in parts if part.token_ids),
            version_spans=tuple(span for of_part in spans for span in of_part),
        )


Rollout = Callable[[Prompt, SamplingParams, Engines], Awaitable[Sample | list[Sample]]]
"""`await rollout(prompt, sampling_params, engines)`: one sample, or a conversation split into several samples."""
