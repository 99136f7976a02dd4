"""skyrl_train 0.4's client of the engines, over the requests of a rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_train.rollout.contract import Engines, Rollout
from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import SamplingParams

log = logging.getLogger(__name__)
FIXED: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0, 1, None),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (True,),
    "logprobs": (None, 0, 1),
    "repetition_penalty": (1, None),
    "n": (1, None),
}
"""vLLM's parameters with one meaning here -> values that say so."""
OWNED_BY_THE_RUN = (
    *("wake_up", "sleep", "reset_prefix_cache", "pause_generation", "resume_generation", "teardown"),
)  # fmt: skip


@dataclass(slots=True)
class Call:
    """The call of `generate` in which a request is made."""

    engines: Engines
    params: SamplingParams
    uid: str
    rollout: Rollout
    """The one that plays environments."""
    versions: list[int] = field(default_factory=list)
    """Policy versions that answered."""


CURRENT: ContextVar[Call] = ContextVar("call")


class InferenceEngineClient:
    """Requests to the engines of the run, within `generate` of a generator."""

    backend = "vllm"

    def __init__(self, tokenizer: Any, model_name: str) -> None:
        self.tokenizer, self.model_name = tokenizer, model_name

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answers to `prompts` (messages) or `prompt_token_ids`, all at once.

        Args: input_batch: also `sampling_params`, in vLLM's words, and `session_ids`: requests of one reach one engine.
        Returns: responses, response_ids, stop_reasons and response_logprobs, a list each.
        """
        call = CURRENT.get(None)
        if call is None:
            raise RuntimeError("inference_engine_client.generate was called outside of a generator's generate")
        chat = call.engines.chat
        prompts = input_batch.get("prompt_token_ids") or [chat.prompt_ids(each) for each in input_batch["prompts"]]
        params = sampling_params_of(input_batch.get("sampling_params"), call.params)
        sessions = input_batch.get("session_ids") or [call.uid] * len(prompts)
        requests = (
            call.engines.generate(list(prompt), params, str(session))
            for prompt, session in zip(prompts, sessions, strict=True)
        )
        answers = await asyncio.gather(*requests)
        call.versions += [answer.policy_version for answer in answers]
        return {
            "responses": [answer.text for answer in answers],
            "response_ids": [answer.token_ids for answer in answers],
            "stop_reasons": [answer.stop_reason for answer in answers],
            "response_logprobs": [answer.logprobs for answer in answers],
        }

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: Mapping[str, Any] | None,
        session_id: str | int | None = None,
    ) -> dict[str, Any]:
        """`num_samples` answers to one prompt, like `generate`."""
        sessions = None if session_id is None else [session_id] * num_samples
        prompts = [list(prompt_token_ids)] * num_samples
        return await self.generate(
            {"prompt_token_ids": prompts, "sampling_params": sampling_params, "session_ids": sessions}
        )

    def __getattr__(self, name: str) -> Any:
        if name in OWNED_BY_THE_RUN:
            log.warning("inference_engine_client.%s does nothing: the run wakes, pauses and updates its engines", name)
            return _nothing
        if name in ("chat_completion", "completion"):
            raise NotImplementedError(
                f"inference_engine_client.{name} is not served. Set generator.enable_http_endpoint=true, and send "
                "requests to the engines' addresses"
            )
        raise AttributeError(f"InferenceEngineClient has no {name}")


async def _nothing(*arguments: Any, **named: Any) -> None:
    """The run does it."""


def sampling_params_of(given: Mapping[str, Any] | None, configured: SamplingParams) -> SamplingParams:
    """vLLM's parameters as those of a request; what is not given is configured. Raises: ValueError for others."""
    changes = dict(given or {})
    for name, allowed in FIXED.items():
        if name in changes and changes.pop(name) not in allowed:
            raise ValueError(f"sampling parameter {name}: only {allowed[0]} is possible here")
    length = changes.pop("max_tokens", changes.pop("max_generate_length", None))
    stop = changes.pop("stop", None)
    stop = configured.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    numbers = {
        name: changes.pop(name) for name in ("temperature", "top_p", "top_k", "min_p", "seed") if name in changes
    }
    if changes:
        raise ValueError(f"sampling parameters {', '.join(changes)}: requests do not have them. Remove them")
    longest = configured.max_generate_length if length is None else length
    return replace(configured, max_generate_length=longest, stop=stop, **numbers)


def of_repetition(call: Call, repetition: int) -> tuple[Engines, SamplingParams]:
    """Engines and parameters of one sample of a group, so that its seeds do not depend on the others."""
    return call.engines.for_a_rollout(), seeded(call.params, "repetition", repetition)
