"""What is between the clients of the HTTP endpoint and vLLM's application: the key, the bound of a body, the wait while
the engine is paused, and the versions of the weights and the sampling parameters that made an answer.

Plain ASGI, so that it holds for every route, and free of vLLM.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from skyrl_train.types import VersionSpans

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING_PATHS = ("/v1/", "/v2/", "/inference/", "/generative_scoring", "/invocations", "/cohere/")
"""POST requests to these ask the engine for tokens."""
OPEN_PATHS = ("/health", "/ping")
"""Need no key: those who watch over a service ask them."""
BODY_BYTES_PER_TOKEN = 64
"""A token id is less than 8 bytes of JSON, a token of text less than 20 on average, also in languages whose letters
are written as escapes of 6 bytes. The rest is for lists of prompts."""
LEAST_BODY_BYTES = 4 << 20
"""For definitions of tools and lists of prompts, where the model takes few tokens."""
MOST_DROPPED_BYTES = 64 << 20
VERSIONS_HEADER = b"x-policy-versions"
FINISH = re.compile(rb'"finish_reason":\s*"')


class Answer:
    """What is known of the versions of one HTTP answer while it is made."""

    def __init__(self) -> None:
        self._num_choices = 0
        self.choices: dict[int, VersionSpans] = {}
        """Choice of the answer -> its spans, of those that have ended."""
        self.told = False
        """The client has been told all of them."""
        self.sampling_params: dict[str, float | bool] | None = None
        """In force for its requests to the engine."""

    def add_request(self, num_choices: int) -> int:
        """Number of the first choice of the answer's next request to the engine; a list of prompts makes several."""
        first = self._num_choices
        self._num_choices += num_choices
        return first

    @property
    def policy_versions(self) -> list[int]:
        """Every version that drew a token of it, ascending."""
        return sorted({version for spans in self.choices.values() for version, _ in spans})

    @property
    def facts(self) -> dict[str, Any]:
        """What holds for the whole answer."""
        sampling = {} if self.sampling_params is None else {"sampling_params": self.sampling_params}
        return {"policy_versions": self.policy_versions} | sampling

    def describe(self, body: dict[str, Any], *, whole: bool) -> None:
        """Add `policy_versions` and `sampling_params` to the body, and `version_spans` to each of its choices that has
        ended.

        Args: whole means that the body has all choices. If they are then not as many as the engine was asked for, they
            were put together from several requests (beam search), and have no spans of their own.
        """
        choices = body.get("choices") or []
        if not whole or len(choices) == self._num_choices:
            for choice in choices:
                spans = self.choices.get(choice.get("index"))
                if spans is not None and choice.get("finish_reason") is not None:
                    choice["version_spans"] = [list(span) for span in spans]
        body |= self.facts
        self.told = whole or len(self.choices) == self._num_choices


current_answer: ContextVar[Answer | None] = ContextVar("current_answer", default=None)
"""The answer that the running task works on; a task inherits it from the one that started it."""


class NamedVersions:
    """Has every answer name the versions of the weights that drew its tokens.

    A JSON answer gets a header and the fields of `Answer.describe`; of a stream of events those that end a choice get
    the fields, and where a stream has no such events another one is added at its end.
    """

    def __init__(self, app: App) -> None:
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
        self._kind = b""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start, self._kind = message, _header(message, b"content-type").split(b";")[0]
            if self._kind != b"application/json":
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._kind == b"application/json":
            await self._json(message)
        elif self._kind == b"text/event-stream":
            await self._events(message)
        else:
            await self._send(message)

    async def _json(self, message: Message) -> None:
        """Held back until it is whole, because its length and its versions come first."""
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self._answer.choices and self._start["status"] == 200:
            content = json.loads(self._body)
            if isinstance(content, dict):
                self._answer.describe(content, whole=True)
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
            if self._answer.choices and not self._answer.told:
                last = _dumped(self._answer.facts)
                out += b"event: policy_versions\ndata: " + last + b"\n\n"
        if out or ends:
            await self._send({"type": "http.response.body", "body": out, "more_body": not ends})

    def _event(self, event: bytes) -> bytes:
        if not FINISH.search(event) or not event.startswith(b"data: "):
            return event
        content = json.loads(event.removeprefix(b"data: "))
        self._answer.describe(content, whole=False)
        return b"data: " + _dumped(content)


class WaitsWhilePaused:
    """Holds requests for tokens back while the engine is paused, before vLLM looks at them.

    vLLM itself would queue them or refuse them, depending on its version and the kind of pause.
    """

    def __init__(self, app: App, wait_until_running: Callable[[], Awaitable[None]]) -> None:
        """Args: wait_until_running raises TimeoutError after a while, or another error where the engine is dead."""
        self._app, self._wait_until_running = app, wait_until_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(GENERATING_PATHS):
            try:
                await self._wait_until_running()
            except TimeoutError:
                message = "the engine was paused for too long for this request to wait; ask again later"
                return await _refuse(send, 503, "EnginePaused", message, [(b"retry-after", b"10")])
            except RuntimeError as error:
                return await _refuse(send, 503, type(error).__name__, str(error))
        await self._app(scope, receive, send)


class NeedsKey:
    """Asks every request for `Authorization: Bearer KEY`, except for OPEN_PATHS."""

    def __init__(self, app: App, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if hmac.compare_digest(_header(scope, b"authorization"), self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await _refuse(send, 401, "Unauthorized", "this endpoint needs the header `Authorization: Bearer KEY`")


class BoundedBody:
    """Reads a request's body before anything parses it, and refuses one that is longer than any the model could take.

    vLLM's /tokenize (0.32) took 6.4 GB and two minutes for 30 MB.
    """

    def __init__(self, app: App, max_model_len: int) -> None:
        self._app, self._max_model_len = app, max_model_len
        self._max_bytes = max(LEAST_BODY_BYTES, max_model_len * BODY_BYTES_PER_TOKEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        whole = await self._read(_header(scope, b"content-length"), receive)
        if whole is None:
            message = (
                f"the body has more than {self._max_bytes} bytes, and the model takes at most {self._max_model_len} "
                "tokens. Send shorter prompts, or fewer in one request"
            )
            return await _refuse(send, 413, "RequestTooLarge", message, [(b"connection", b"close")])
        held = [whole]

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)

    async def _read(self, announced: bytes, receive: Receive) -> Message | None:
        """The body in one message; None where it is too long.

        The rest of one that is not much longer is dropped as it comes: a client that still writes when the connection
        is closed does not read the answer.
        """
        expected = int(announced) if announced.isdigit() else 0
        if expected > MOST_DROPPED_BYTES:
            return None
        body, num_bytes, more = bytearray(), 0, True
        while more and num_bytes <= MOST_DROPPED_BYTES:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone; the application gets this message again
                break
            part, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(part)
            if max(num_bytes, expected) <= self._max_bytes:
                body += part
        if max(num_bytes, expected) > self._max_bytes:
            return None
        return {"type": "http.request", "body": bytes(body), "more_body": more}


def _header(message: Message, name: bytes) -> bytes:
    """Of a scope or a response; b"" where there is none."""
    return next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _dumped(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


async def _refuse(
    send: Send, status: int, kind: str, message: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """In the form of OpenAI's errors, which is vLLM's too."""
    body = _dumped({"error": {"message": message, "type": kind, "param": None, "code": status}})
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": own + (headers or [])})
    await send({"type": "http.response.body", "body": body})
