"""Contract of a rollout, which `generator.rollout` names as `module:function`."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import Generate, Generation, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import Config
    from skyrl_train.data.chat import ChatTemplate


class GenerationAborted(RuntimeError):
    """An engine aborted a generation; its sample would be truncated at an arbitrary token."""


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
    ) -> None:
        self._generate = generate
        self.tokenizer = tokenizer
        self.chat = chat
        """Messages to token ids: `prompt_ids(messages)`, and `reply_ids(written, messages)` after a response."""
        self.max_input_length = max_input_length
        """Maximum number of tokens of a request (`generator.max_input_length`)."""
        self.max_turns = max_turns
        """`generator.max_turns`, for rollouts that have turns."""
        self._config = config
        self._num_requests = 0
        self.error: Exception | None = None
        """Error of the engines themselves, which ends the run and not just the rollout."""

    @property
    def config(self) -> Config:
        """The run's configuration; `config.extra` holds the user's own values."""
        assert self._config is not None, "built without a configuration"
        return self._config

    def for_a_rollout(self) -> Engines:
        """A new object for one rollout."""
        engines = copy.copy(self)
        engines._num_requests, engines.error = 0, None
        return engines

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, route_key: str
    ) -> Generation:
        """Sample a response. Requests with the same route key reach the same engine, which caches their prefix.

        Raises: ValueError for more tokens than `max_input_length`; GenerationAborted; errors of the engines.
        """
        if len(prompt_token_ids) > self.max_input_length:
            raise ValueError(
                f"a request has {len(prompt_token_ids)} tokens, more than generator.max_input_length "
                f"{self.max_input_length}. Shorten it, or raise the limit"
            )
        number, self._num_requests = self._num_requests, self._num_requests + 1
        try:
            generation = await self._generate(prompt_token_ids, seeded(sampling_params, number), route_key)
        except Exception as error:
            self.error = error
            raise
        if generation.stop_reason == "abort":
            raise GenerationAborted(f"the engine aborted turn {number + 1} of a sample of prompt {route_key}")
        return generation


Rollout = Callable[[Prompt, SamplingParams, Engines], Awaitable[Sample | list[Sample]]]
"""`await rollout(prompt, sampling_params, engines)`: one sample, or a conversation split into several samples."""
