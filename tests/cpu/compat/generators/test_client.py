"""The client of the engines as generators of skyrl_train 0.4 use it: requests and answers are token ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.compat.generators.client import CURRENT, Call, InferenceEngineClient, sampling_params_of
from skyrl_train.compat.generators.outputs import vllm_params
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.contract import Engines
from skyrl_train.types import Generation, SamplingParams
from tests.support.rollouts import prompt
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PARAMS = SamplingParams(max_generate_length=4, temperature=0.5, stop=("!",), seed=1)
CLIENT: Any = InferenceEngineClient(TOKENIZER, "model")


class Echo:
    """Answers with what it read, the longest first, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams, str]] = []

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        self.asked.append((token_ids, params, route_key))
        await asyncio.sleep(0.02 / len(token_ids))
        logprobs = [-float(token) for token in token_ids]
        return Generation(token_ids, logprobs, TOKENIZER.decode(token_ids), "stop", len(token_ids))


def within_a_call(request: Coroutine[Any, Any, Any], generate: Any) -> tuple[Any, Call]:
    engines = Engines(generate, TOKENIZER, ChatTemplate(TOKENIZER, {}), max_input_length=8, max_turns=1)
    call = Call(engines, PARAMS, prompt("7"), None)  # type: ignore[arg-type]

    async def main() -> Any:
        CURRENT.set(call)
        return await request

    return asyncio.run(main()), call


def test_answers_come_in_the_order_of_the_requests_whichever_ends_first():
    generate = Echo()
    given = {"prompt_token_ids": [[1], [2, 3, 4], [5, 6]], "session_ids": ["a", "b", "a"], "sampling_params": None}
    answers, call = within_a_call(CLIENT.generate(given), generate)
    assert answers["response_ids"] == [[1], [2, 3, 4], [5, 6]]
    assert answers["response_logprobs"] == [[-1.0], [-2.0, -3.0, -4.0], [-5.0, -6.0]]
    assert answers["stop_reasons"] == ["stop"] * 3
    assert answers["responses"] == [TOKENIZER.decode(ids) for ids in ([1], [2, 3, 4], [5, 6])]
    assert sorted(call.versions) == [1, 2, 3] and call.error is None
    assert [route for _, _, route in generate.asked] == ["a", "b", "a"]
    assert all((params.temperature, params.stop) == (0.5, ("!",)) for _, params, _ in generate.asked)
    assert len({params.seed for _, params, _ in generate.asked}) == 3, "two requests of a session have two seeds"


def test_messages_are_rendered_by_the_chat_template_and_share_the_rows_session():
    generate = Echo()
    messages = [{"role": "user", "content": "1+2="}]
    answers, _ = within_a_call(CLIENT.generate({"prompts": [messages] * 2}), generate)
    assert answers["response_ids"] == [TOKENIZER.encode("1+2=")] * 2
    assert [route for _, _, route in generate.asked] == ["7", "7"]
    assert len({params.seed for _, params, _ in generate.asked}) == 2


def test_messages_are_rendered_with_the_tools_and_variables_of_the_row():
    template = "{{ tools[0]['function']['name'] }}{{ mode }}{{ messages[0]['content'] }}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    row = {"tools": [{"type": "function", "function": {"name": "1"}}], "chat_template_kwargs": {"mode": "+"}}
    engines = Engines(generate := Echo(), tokenizer, ChatTemplate(tokenizer, {}), max_input_length=8, max_turns=1)

    async def main() -> None:
        CURRENT.set(Call(engines, PARAMS, replace(prompt("7"), extras=row), None))  # type: ignore[arg-type]
        await CLIENT.generate({"prompts": [[{"role": "user", "content": "2="}]]})

    asyncio.run(main())
    assert [tokenizer.decode(ids) for ids, *_ in generate.asked] == ["1+2="]


def test_sample_asks_for_several_answers_to_one_prompt():
    answers, _ = within_a_call(CLIENT.sample([1, 2], 3, {"max_tokens": 2}, session_id=5), generate := Echo())
    assert answers["response_ids"] == [[1, 2]] * 3
    assert [(params.max_generate_length, route) for _, params, route in generate.asked] == [(2, "5")] * 3


@pytest.mark.parametrize("given", [{}, {"prompts": [[]], "prompt_token_ids": [[1]]}])
def test_an_input_has_messages_or_tokens(given: dict[str, Any]):
    with pytest.raises(ValueError, match="prompts or prompt_token_ids, and not both"):
        within_a_call(CLIENT.generate(given), Echo())


def test_requests_outside_of_a_generators_call_are_refused():
    with pytest.raises(RuntimeError, match="called outside of a generator's generate. Call it in a task of that"):
        asyncio.run(CLIENT.generate({"prompt_token_ids": [[1]]}))


def test_parameters_of_vllm_are_those_of_a_request():
    assert sampling_params_of(vllm_params(PARAMS), PARAMS) == PARAMS
    assert sampling_params_of(None, PARAMS) == sampling_params_of({}, PARAMS) == PARAMS
    given = {"max_tokens": 9, "temperature": 0.0, "top_k": 3, "stop": "\n", "min_p": 0.1, "top_p": 0.9, "n": 1}
    assert sampling_params_of(given, PARAMS) == SamplingParams(9, 0.0, 0.9, 3, 0.1, ("\n",), 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": 5}, "sampling parameter logprobs is 5: requests have 0. Remove it"),
        ({"min_tokens": 3}, "sampling parameter min_tokens is 3: requests have 1. Remove it"),
        ({"repetition_penalty": 1.1}, "sampling parameter repetition_penalty is 1.1"),
        ({"best_of": 2, "guided_json": {}}, "sampling parameters best_of, guided_json: requests do not have them"),
    ],
)
def test_parameters_that_requests_do_not_have_are_refused_by_name(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        sampling_params_of(given, PARAMS)


def test_what_the_run_does_itself_is_a_warning_and_what_is_not_served_an_error(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        asyncio.run(CLIENT.wake_up(tags=["weights"]))
    assert "inference_engine_client.wake_up does nothing" in caplog.text
    with pytest.raises(NotImplementedError, match="chat_completion is not served. Set generator.enable_http_endpoint"):
        _ = CLIENT.chat_completion
    with pytest.raises(AttributeError, match="has no engines"):
        _ = CLIENT.engines
