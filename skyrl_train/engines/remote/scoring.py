"""Logprobs of given tokens from a running vLLM server, also as the teacher of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyrl_train.engines.remote.client import ServerClient
from skyrl_train.engines.remote.facts import ServerUnsuitableError, check_tokenizer

MAX_CONNECTIONS = 64
"""Samples that a server scores at a time; others wait here."""


async def prompt_logprobs(client: ServerClient, prompts: Sequence[list[int]], timeout_s: float) -> list[list[float]]:
    """Like `Engine.prompt_logprobs`. Args: timeout_s: of each prompt, from when it is sent."""
    places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def score(token_ids: list[int]) -> list[float]:
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        async with places:  # the deadline of a post includes its wait for a connection
            answer = await client.post("/v1/completions", body, timeout_s)
        pairs = zip(answer["choices"][0]["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [0.0] + [row[str(token_id)]["logprob"] for row, token_id in pairs]

    return list(await asyncio.gather(*(score(token_ids) for token_ids in prompts)))


class ServedTeacher:
    """A running server, also an unmodified one, that scores samples with weights that this run does not change."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        policy_path: str,
        trust_remote_code: bool,
        max_model_len: int,
        timeout_s: float,
    ) -> None:
        """Args: policy_path: folder of the policy, whose tokens the server must have; max_model_len: tokens of the
        longest sample, and one more.
        """
        self._client = ServerClient(url, api_key, MAX_CONNECTIONS)
        self._policy_path, self._trust_remote_code = policy_path, trust_remote_code
        self._max_model_len, self._timeout_s = max_model_len, timeout_s

    async def start(self) -> None:
        """Raises: ServerUnreachableError; ServerUnsuitableError for other tokens or a shorter context; ServerError."""
        served = (await self._client.get("/v1/models", self._timeout_s))["data"][0]
        if served["max_model_len"] < self._max_model_len:
            raise ServerUnsuitableError(
                f"the server {self._client.url} of the teacher has --max-model-len {served['max_model_len']}: a sample "
                f"may need {self._max_model_len}. Raise it, or lower generator.max_input_length or max_generate_length"
            )
        await check_tokenizer(self._client, self._policy_path, self._trust_remote_code)

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Raises: ServerUnreachableError, ServerError, TimeoutError."""
        return await prompt_logprobs(self._client, prompts, self._timeout_s)

    async def shutdown(self) -> None:
        """Close the connections; the server keeps running."""
        await self._client.close()
