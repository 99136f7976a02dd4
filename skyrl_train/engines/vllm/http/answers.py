"""ASGI middleware between the HTTP endpoint's clients and vLLM's application: API key, body limit, waiting while the
engine is paused, and the policy versions and sampling parameters of each answer. Applies to all routes; no vLLM.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_train.types import VersionSpans

GENERATING_PATHS = ("/v1/", "/v2/", "/inference/", "/generative_scoring", "/invocations", "/cohere/")
"""Prefixes of the POST routes that generate tokens."""
OPEN_PATHS = ("/health", "/ping")
"""Health checks need no key."""
BODY_BYTES_PER_TOKEN = 64
"""A token id takes less than 8 bytes of JSON, a token of text less than 20 on average, even with escapes of 6 bytes per
letter. The rest allows lists of prompts."""
MIN_BODY_LIMIT = 4 << 20
"""Bytes; allows tool definitions and lists of prompts for models with a short context."""
MAX_DROPPED_BYTES = 64 << 20
VERSIONS_HEADER = b"x-policy-versions"
FINISH = re.compile(rb'"finish_reason":\s*"')

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
CONSTRAINTS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "logits_processors",
    "thinking_token_budget",
)
"""Other parameters that exclude tokens or change their probabilities."""


class Answer:
    """Policy versions and sampling parameters of one HTTP answer, while it is generated."""

    def __init__(self) -> None:
        self._num_choices = 0
        self.choices: dict[int, VersionSpans] = {}
        """Finished choice -> its spans."""
        self.is_reported = False
        """All of them were sent to the client."""
        self.sampling_params: dict[str, float | bool] | None = None
        """Parameters of its requests to the engine."""

    def add_request(self, num_choices: int) -> int:
        """Index of the first choice of the next request to the engine; a list of prompts makes several requests."""
        first = self._num_choices
        self._num_choices += num_choices
        return first

    @property
    def policy_versions(self) -> list[int]:
        """Versions that generated its tokens, ascending."""
        return sorted({version for spans in self.choices.values() for version, _ in spans})

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about all choices together."""
        sampling = {} if self.sampling_params is None else {"sampling_params": self.sampling_params}
        return {"policy_versions": self.policy_versions} | sampling

    def describe(self, body: dict[str, Any], *, complete: bool) -> None:
        """Add `policy_versions` and `sampling_params` to the body, and `version_spans` to its finished choices.

        Args: complete: the body has all choices. If their number is not the one requested from the engine, they were
            assembled from several requests (beam search), and have no spans.
        """
        choices = body.get("choices") or []
        if not complete or len(choices) == self._num_choices:
            for choice in choices:
                spans = self.choices.get(choice.get("index"))
                if spans is not None and choice.get("finish_reason") is not None:
                    choice["version_spans"] = [list(span) for span in spans]
        body |= self.facts
        self.is_reported = complete or len(self.choices) == self._num_choices


def sampling_facts(params: Any) -> dict[str, float | bool]:
    """The numbers, and `true` for each constraint that is set. Args: params: vLLM's SamplingParams."""
    facts: dict[str, float | bool] = {name: getattr(params, name) for name in NUMBERS}
    facts["top_k"] = params.top_k if params.top_k > 0 else -1
    if params.min_tokens > 0:
        facts["min_tokens"] = params.min_tokens
    return facts | {name: True for name in CONSTRAINTS if getattr(params, name, None) not in (None, [], {})}


current_answer: ContextVar[Answer | None] = ContextVar("current_answer", default=None)
"""The answer that the running task works on; inherited by the tasks that it starts."""


class NamedVersions:
    """Adds to every answer the policy versions that generated its tokens.

    A JSON answer gets a header and the fields of `Answer.describe`. In a stream of events, those that finish a choice
    get the fields; a stream without such events gets another one at its end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        answer = Answer()
        token = current_answer.set(answer)
        try:
            await self._app(scope, receive, _Writer(answer, send))
        finally:
            current_answer.reset(token)


class _Writer:
    """The `send` of one request."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self._answer, self._send = answer, send
        self._start: Message = {}
        self._kind = ""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start, content_type = message, Headers(raw=message.get("headers", [])).get("content-type", "")
            self._kind = content_type.split(";")[0]
            if self._kind != "application/json":
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._kind == "application/json":
            await self._json(message)
        elif self._kind == "text/event-stream":
            await self._events(message)
        else:
            await self._send(message)

    async def _json(self, message: Message) -> None:
        """Held back until complete, because length and versions precede it."""
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self._answer.choices and self._start["status"] == 200:
            content = json.loads(self._body)
            if isinstance(content, dict):
                self._answer.describe(content, complete=True)
                self._body = _dumped(content)
            versions = ",".join(map(str, self._answer.policy_versions)).encode()
            kept = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
            length = (b"content-length", str(len(self._body)).encode())
            self._start["headers"] = [*kept, length, (VERSIONS_HEADER, versions)]
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body, "more_body": False})

    async def _events(self, message: Message) -> None:
        *events, self._body = (self._body + message.get("body", b"")).split(b"\n\n")
        ends = not message.get("more_body", False)
        out = b"".join(self._event(event) + b"\n\n" for event in events)
        if ends:
            out += self._body
            if self._answer.choices and not self._answer.is_reported:
                last = _dumped(self._answer.facts)
                out += b"event: policy_versions\ndata: " + last + b"\n\n"
        if out or ends:
            await self._send({"type": "http.response.body", "body": out, "more_body": not ends})

    def _event(self, event: bytes) -> bytes:
        if not FINISH.search(event) or not event.startswith(b"data: "):
            return event
        content = json.loads(event.removeprefix(b"data: "))
        self._answer.describe(content, complete=False)
        return b"data: " + _dumped(content)


class WaitsWhilePaused:
    """Holds requests for tokens while the engine is paused. vLLM would queue or reject them, depending on its version
    and the mode of the pause.
    """

    def __init__(self, app: ASGIApp, wait_until_running: Callable[[], Awaitable[None]]) -> None:
        """Args: wait_until_running: raises TimeoutError after a while, RuntimeError if the engine is dead."""
        self._app, self._wait_until_running = app, wait_until_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(GENERATING_PATHS):
            try:
                await self._wait_until_running()
            except TimeoutError:
                message = "the engine was paused for too long. Retry later"
                return await _error(503, "EnginePaused", message, {"retry-after": "10"})(scope, receive, send)
            except RuntimeError as error:
                return await _error(503, type(error).__name__, str(error))(scope, receive, send)
        await self._app(scope, receive, send)


class NeedsKey:
    """Requires `Authorization: Bearer KEY` for all but OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if hmac.compare_digest(Headers(scope=scope).get("authorization", "").encode(), self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        message = "this endpoint requires the header `Authorization: Bearer KEY`"
        await _error(401, "Unauthorized", message)(scope, receive, send)


class BoundedBody:
    """Reads a request's body before it is parsed, and rejects one that is longer than the model's context can need.
    vLLM's /tokenize (0.32) took 6.4 GB and two minutes for 30 MB.
    """

    def __init__(self, app: ASGIApp, max_model_len: int) -> None:
        self._app, self._max_model_len = app, max_model_len
        self._max_bytes = max(MIN_BODY_LIMIT, max_model_len * BODY_BYTES_PER_TOKEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = await self._read(Headers(scope=scope).get("content-length", ""), receive)
        if body is None:
            message = (
                f"the body has more than {self._max_bytes} bytes, but the model accepts at most {self._max_model_len} "
                "tokens. Send shorter prompts, or fewer in one request"
            )
            return await _error(413, "RequestTooLarge", message, {"connection": "close"})(scope, receive, send)
        held = [body]

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)

    async def _read(self, announced: str, receive: Receive) -> Message | None:
        """Return the body in one message, or None if it is too long. A body that is not much too long is read to its
        end: a client that is still writing when the connection closes does not read the answer.
        """
        expected = int(announced) if announced.isdigit() else 0
        if expected > MAX_DROPPED_BYTES:
            return None
        body, num_bytes, more = bytearray(), 0, True
        while more and num_bytes <= MAX_DROPPED_BYTES:
            message = await receive()
            if message["type"] != "http.request":  # disconnected; the application receives this message again
                break
            part, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(part)
            if max(num_bytes, expected) <= self._max_bytes:
                body += part
        if max(num_bytes, expected) > self._max_bytes:
            return None
        return {"type": "http.request", "body": bytes(body), "more_body": more}


def _dumped(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _error(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer in OpenAI's (and vLLM's) form of errors."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers)
