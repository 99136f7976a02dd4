"""skyrl_train 0.4's client of the engines, over the requests of a rollout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_train.compat.generators.types import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.rollout.collect import all_or_first_error, task_name
from skyrl_train.rollout.contract import Engines, Rollout
from skyrl_train.rollout.seeds import seeded
from skyrl_train.types import Prompt, SamplingParams

log = logging.getLogger(__name__)
FIXED: dict[str, tuple[Any, ...]] = {
    "min_tokens": (1, 0, None),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (True,),
    "logprobs": (0, 1, None),
    "repetition_penalty": (1, None),
    "n": (1, None),
}
"""vLLM's parameters with one meaning here -> values that say so."""
OWNED_BY_THE_RUN = ("wake_up", "sleep", "reset_prefix_cache", "pause_generation", "resume_generation", "teardown")


@dataclass(slots=True)
class Call:
    """The call of `generate` in which requests are made, that of one group."""

    engines: Engines
    params: SamplingParams
    prompt: Prompt
    rollout: Rollout
    """The one that plays environments."""
    versions: list[int] = field(default_factory=list)
    """Policy versions that answered."""
    _sessions: dict[str, Engines] = field(default_factory=dict)

    def session(self, name: str) -> tuple[Engines, SamplingParams]:
        """Engines and parameters of a session, whose seeds depend on its name and the number of its requests."""
        return self._sessions.setdefault(name, self.engines.for_a_rollout(self.prompt)), seeded(self.params, name)

    @property
    def error(self) -> Exception | None:
        """Error of the engines themselves, which ends the run."""
        return next((each.error for each in self._sessions.values() if each.error is not None), None)


CURRENT: ContextVar[Call] = ContextVar("call")


class InferenceEngineClient:
    """Requests to the engines of the run, within `generate` of a generator."""

    backend = "vllm"

    def __init__(self, tokenizer: Any, model_name: str) -> None:
        self.tokenizer, self.model_name = tokenizer, model_name

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Answers to `prompts` (messages) or `prompt_token_ids`, all at once.

        Requests of one of the `session_ids` reach one engine, and their seeds do not depend on other sessions. Without
        `sampling_params` they have those of the phase.

        Raises: RuntimeError outside of a generator's `generate`; ValueError for parameters that requests do not have.
        """
        call = CURRENT.get(None)
        if call is None:
            raise RuntimeError(
                "inference_engine_client.generate was called outside of a generator's generate. Call it in a task of "
                "that coroutine, not in another process"
            )
        messages, prompts = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (messages is None) == (prompts is None):
            raise ValueError("an engine's input has prompts or prompt_token_ids, and not both. Give one of them")
        if prompts is None:
            chat = call.engines.chat.for_row(call.prompt.extras)
            prompts = [chat.prompt_ids(each) for each in messages or ()]
        given = input_batch.get("sampling_params")
        sessions = input_batch.get("session_ids") or [call.prompt.uid] * len(prompts)
        requests = []
        for prompt, session in zip(prompts, map(str, sessions), strict=True):
            engines, params = call.session(session)
            requests.append(engines.generate(list(prompt), sampling_params_of(given, params), session))
        # Named like the rollout's task, whose stack is shown if no answer comes.
        answers = await all_or_first_error([(task_name(call.prompt), request) for request in requests])
        call.versions += [answer.policy_version for answer in answers]
        return InferenceEngineOutput(
            responses=[answer.text for answer in answers],
            response_ids=[answer.token_ids for answer in answers],
            stop_reasons=[answer.stop_reason for answer in answers],
            response_logprobs=[answer.logprobs for answer in answers],
        )

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: dict[str, Any] | None,
        session_id: str | int | None = None,
    ) -> InferenceEngineOutput:
        """`num_samples` answers to one prompt, like `generate`."""
        sessions = None if session_id is None else [session_id] * num_samples
        prompts = [list(prompt_token_ids)] * num_samples
        return await self.generate(
            InferenceEngineInput(prompt_token_ids=prompts, sampling_params=sampling_params, session_ids=sessions)
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
        value = changes.pop(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"sampling parameter {name} is {value}: requests have {allowed[0]}. Remove it")
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
