"""vLLM's OpenAI-compatible HTTP API around a running engine, in the engine's process and event loop.

The model is served as `NAME` and `NAME@VERSION`; the second name changes with every weight sync. `answers.py` adds
versions and sampling parameters to each answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.config.values import is_loopback
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.engines.vllm import compat
from skyrl_train.engines.vllm.http.answers import (
    Answer,
    BoundedBody,
    NamedVersions,
    NeedsKey,
    WaitsWhilePaused,
    current_answer,
    sampling_facts,
)
from skyrl_train.engines.vllm.versions import VersionTracker

START_S = 60.0
STOP_S = 2.0
"""Seconds for running answers to finish at shutdown."""
Wait = Callable[[], Awaitable[None]]


class HttpServer:
    """The endpoint of one engine, from `start` to `stop`."""

    def __init__(self, settings: EngineSettings, llm: AsyncLLM, versions: VersionTracker, wait: Wait) -> None:
        """Args: wait: returns when the engine is running, raises TimeoutError or RuntimeError if it will not."""
        generator = settings.generator
        if generator.http_api_key is None and not is_loopback(generator.http_endpoint_host):
            raise ValueError(
                f"generator.http_endpoint_host is {generator.http_endpoint_host}: the HTTP endpoint would be open "
                "without authentication. Set generator.http_api_key, or generator.http_endpoint_host=127.0.0.1"
            )
        self._settings, self._generator = settings, generator
        self._client = VersionedClient(llm, versions, wait)
        self._wait = wait
        self._app: Any = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        host = self._generator.http_endpoint_host
        if host in ("0.0.0.0", "::"):
            host = self._settings.advertised_host or socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def start(self, policy_version: int) -> str:
        """Returns the endpoint's URL.
        Raises: ValueError if the port is taken or the host is not an address of this computer.
        """
        port = self._generator.http_endpoint_port
        listening = _listen(self._generator.http_endpoint_host, port and port + self._settings.index)
        try:
            self._port = listening.getsockname()[1]
            arguments = ["--model", self._settings.model_path]
            if self._generator.chat_template_kwargs:
                arguments += ["--default-chat-template-kwargs", json.dumps(self._generator.chat_template_kwargs)]
            self._app = await compat.build_openai_app(self._client, compat.server_arguments(arguments))
            self.move_to(policy_version)
            config = uvicorn.Config(
                self._guarded(self._app),
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
            self._server = _Server(config)
            # vLLM's handler of a dead engine stops this server, and fails without one.
            self._app.state.server = self._server
            self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
            await self._until_started(self._server, self._task)
        except BaseException:
            listening.close()
            raise
        return self.url

    async def _until_started(self, server: uvicorn.Server, task: asyncio.Task[None]) -> None:
        deadline = time.monotonic() + START_S
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server ended during its start; see the log of its process")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the HTTP server did not start within {START_S:g} s")
            await asyncio.sleep(0.01)

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        served: ASGIApp = WaitsWhilePaused(NamedVersions(app), self._wait)
        served = BoundedBody(served, self._settings.max_model_len)
        key = self._generator.http_api_key
        return served if key is None else NeedsKey(served, key)

    def move_to(self, policy_version: int) -> None:
        """Serve the model under this version's name instead of the previous one."""
        name = self._settings.served_model_name
        names = [f"{name}@{policy_version}", name]
        compat.set_served_names(self._app, self._settings.model_path, names)

    async def stop(self) -> None:
        """Close the port; running answers have STOP_S to finish."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            done, _ = await asyncio.wait({self._task}, timeout=STOP_S + 2)
            if not done:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=1)
            self._server = self._task = None


class VersionedClient:
    """The engine of vLLM's application: an AsyncLLM that records the versions of its outputs."""

    def __init__(self, llm: AsyncLLM, versions: VersionTracker, wait: Wait) -> None:
        self._llm, self._versions, self._wait = llm, versions, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **arguments: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        answer = current_answer.get() or Answer()
        answer.sampling_params = sampling_facts(sampling_params)
        first_choice = answer.add_request(sampling_params.n)

        async def outputs() -> AsyncGenerator[RequestOutput, None]:
            while True:
                await self._wait()  # a pause may have begun since the request was accepted
                has_begun = False
                try:
                    stream = self._versions.generate(prompt, sampling_params, request_id, **arguments)
                    async with contextlib.aclosing(stream) as generated:
                        async for output, ended in generated:
                            has_begun = True
                            answer.choices |= {first_choice + index: spans for index, spans in ended.items()}
                            yield output
                    return
                except Exception as error:
                    if has_begun or not compat.is_refusal_of_a_pause(error):
                        raise

        return outputs()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which this server does not own."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()  # else a second process could bind the same port, and fail only when it serves
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ValueError(
            f"the HTTP endpoint cannot listen on {host} port {port}: {error}. Set generator.http_endpoint_port to "
            "another port, or to 0 for any free one"
        ) from error
    return listening
