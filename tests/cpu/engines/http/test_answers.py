"""What is put between an HTTP client and vLLM's application, around applications of a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from skyrl_train.engines.vllm.http.answers import (
    MAX_DROPPED_BYTES,
    Answer,
    BoundedBody,
    NamedVersions,
    NeedsKey,
    WaitsWhilePaused,
    current_answer,
    sampling_facts,
)

Told = list[dict[str, Any]]


def asked(
    app: ASGIApp, path: str = "/v1/completions", method: str = "POST", headers: dict[str, str] | None = None
) -> Told:
    """The messages that a server would get from `app` for one request."""
    told: Told = []

    async def send(message: Any) -> None:
        told.append(dict(message))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    asyncio.run(app({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send))
    return told


def body(told: Told) -> bytes:
    return b"".join(message.get("body", b"") for message in told)


def header(told: Told, name: bytes) -> bytes | None:
    return dict(told[0]["headers"]).get(name)


def answering(spans: dict[int, Any], parts: list[bytes], kind: str, num_choices: int | None = None) -> ASGIApp:
    """An application that asks its engine for `num_choices` and then answers in these parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = current_answer.get()
        assert answer is not None
        answer.add_request(len(spans) if num_choices is None else num_choices)
        length = str(sum(len(part) for part in parts)).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def in_a_task() -> None:  # as vLLM's generators run
            current = current_answer.get()
            assert current is answer
            current.choices |= spans

        await asyncio.create_task(in_a_task())
        for number, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts) - 1})

    return NamedVersions(app)


def choice(index: int, finish: str | None, **more: object) -> dict[str, Any]:
    return {"index": index, "finish_reason": finish} | more


def test_a_json_answer_names_the_versions_of_each_choice_and_of_all_in_a_header():
    content = json.dumps({"object": "text_completion", "choices": [choice(0, "stop"), choice(1, "length", text="é")]})
    told = asked(
        answering({0: ((3, 5),), 1: ((3, 2), (4, 9))}, [content[:9].encode(), content[9:].encode()], "application/json")
    )
    found = json.loads(body(told))
    assert [one["version_spans"] for one in found["choices"]] == [[[3, 5]], [[3, 2], [4, 9]]]
    assert found["policy_versions"] == [3, 4] and found["choices"][1]["text"] == "é"
    assert header(told, b"x-policy-versions") == b"3,4"
    assert header(told, b"content-length") == str(len(body(told))).encode()


def test_choices_that_were_put_together_from_many_requests_have_no_spans_of_their_own():
    content = json.dumps({"choices": [choice(0, "stop"), choice(1, "stop")]}).encode()
    found = json.loads(body(asked(answering({n: ((n, 1),) for n in range(8)}, [content], "application/json"))))
    assert "version_spans" not in found["choices"][0] and found["policy_versions"] == list(range(8))


@pytest.mark.parametrize("cut", [1, 7, 40, 10_000])
def test_a_stream_names_the_versions_where_a_choice_ends_however_it_is_cut(cut: int):
    chunks = [
        {"choices": [choice(0, None, text='"finish_reason":"stop"')]},
        {"choices": [choice(1, "stop")]},
        {"choices": [choice(0, "length")]},
        {"choices": [], "usage": {}},
    ]
    stream = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    parts = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    told = asked(answering({0: ((7, 1), (8, 1)), 1: ((8, 4),)}, parts, "text/event-stream; charset=utf-8"))
    events = [event.removeprefix(b"data: ") for event in body(told).split(b"\n\n")]
    assert events.pop() == b"" and events.pop() == b"[DONE]"
    first, second, third, last = map(json.loads, events)
    assert first == chunks[0] and last == chunks[3]
    assert second["choices"][0]["version_spans"] == [[8, 4]]
    assert third["choices"][0]["version_spans"] == [[7, 1], [8, 1]] and third["policy_versions"] == [7, 8]
    assert told[-1]["more_body"] is False


def test_a_stream_without_choices_names_the_versions_in_an_event_of_its_own():
    part = b'event: response.completed\ndata: {"status":"completed"}\n\n'
    told = body(asked(answering({0: ((2, 3), (5, 1))}, [part], "text/event-stream")))
    assert told == part + b'event: policy_versions\ndata: {"policy_versions":[2,5]}\n\n'


@pytest.mark.parametrize(("spans", "kind"), [({}, "application/json"), ({0: ((1, 2),)}, "text/plain")])
def test_other_answers_pass_as_they_are(spans: dict[int, Any], kind: str):
    told = asked(answering(spans, [b'{"tokens":', b"[1]}"], kind))
    assert body(told) == b'{"tokens":[1]}' and header(told, b"x-policy-versions") is None


def test_an_answer_says_with_what_it_was_sampled():
    params = SimpleNamespace(
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.1,
        min_tokens=0,
        logit_bias={5: 1.0},
        bad_words=[],
    )
    facts = sampling_facts(params)
    assert facts == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.1,
        "logit_bias": True,
    }
    answer = Answer()
    answer.add_request(1)
    answer.choices, answer.sampling_params = {0: ((3, 2),)}, facts
    body: dict[str, Any] = {"choices": [choice(0, "stop")]}
    answer.describe(body, complete=True)
    assert body["sampling_params"] == facts and body["policy_versions"] == [3]


async def says_hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "/v1/models", 401),
        ({}, "/metrics", 401),
        ({}, "/inference/v1/generate", 401),
        ({"authorization": "Bearer wrong"}, "/v1/models", 401),
        ({"authorization": "secret"}, "/v1/models", 401),
        ({"authorization": "Bearer secret"}, "/v1/models", 200),
        ({}, "/health", 200),
    ],
)
def test_every_path_but_health_needs_the_key(headers: dict[str, str], path: str, status: int):
    told = asked(NeedsKey(says_hello, "secret"), path, "GET", headers)
    assert told[0]["status"] == status
    assert (body(told) == b"hello") == (status == 200)


def waiting(wait: Callable[[], Awaitable[None]]) -> ASGIApp:
    return WaitsWhilePaused(says_hello, wait)


def test_requests_for_tokens_wait_and_others_do_not():
    waits: list[int] = []

    async def wait() -> None:
        waits.append(1)

    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/tokenize"), ("POST", "/v1/completions")):
        assert body(asked(waiting(wait), path, method)) == b"hello"
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(TimeoutError("late"), "EnginePaused"), (RuntimeError("dead"), "RuntimeError")]
)
def test_a_client_that_waits_too_long_or_for_a_dead_engine_gets_an_error(error: Exception, kind: str):
    async def wait() -> None:
        raise error

    told = asked(waiting(wait))
    assert told[0]["status"] == 503 and json.loads(body(told))["error"]["type"] == kind
    assert (header(told, b"retry-after") is not None) == isinstance(error, TimeoutError)


def posted(parts: list[bytes], headers: dict[str, str], max_model_len: int = 8192) -> tuple[Told, list[bytes], int]:
    """What a client gets that posts its body in parts, what the application read of it, and the parts left unread."""
    left, read, told = list(parts), [], []

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        told.append(dict(message))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read.append((await receive())["body"])
        await says_hello(scope, receive, send)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": pairs}
    asyncio.run(BoundedBody(app, max_model_len)(scope, receive, send))
    return told, read, len(left)


LIMIT = 4 << 20


@pytest.mark.parametrize("headers", [{}, {"content-length": str(LIMIT)}])
def test_a_body_of_the_greatest_length_reaches_the_application_in_one_part(headers: dict[str, str]):
    told, read, _ = posted([b"x"] * 100 + [b"y" * (LIMIT - 100)], headers)
    assert told[0]["status"] == 200 and read == [b"x" * 100 + b"y" * (LIMIT - 100)]


def test_a_model_of_few_tokens_still_takes_long_definitions_of_tools():
    assert posted([b"x" * (4 << 20)], {}, max_model_len=16)[0][0]["status"] == 200
    assert posted([b"x" * (4 << 20), b"x"], {}, max_model_len=16)[0][0]["status"] == 413


@pytest.mark.parametrize("headers", [{}, {"content-length": str(LIMIT + 1)}, {"content-length": "1"}])
def test_a_longer_body_is_refused_before_anything_parses_it(headers: dict[str, str]):
    told, read, left = posted([b"x" * LIMIT, b"x", b"x"], headers)
    error = json.loads(body(told))["error"]
    assert told[0]["status"] == error["code"] == 413 and error["type"] == "RequestTooLarge"
    assert f"more than {LIMIT} bytes, but the model accepts at most 8192 tokens. Send shorter" in error["message"]
    assert read == [] and left == 0, "the rest is read, so that the client reads the answer"


def test_a_body_without_end_is_not_read_to_its_end():
    part = bytes(8 << 20)
    told, read, left = posted([part] * 100, {})
    assert told[0]["status"] == 413 and read == [] and left == 100 - MAX_DROPPED_BYTES // len(part) - 1
    told, read, left = posted([part] * 100, {"content-length": str(100 * len(part))})
    assert told[0]["status"] == 413 and read == [] and left == 100
