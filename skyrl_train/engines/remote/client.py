"""JSON over HTTP to one vLLM server, with deadlines and errors that name server, request and answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

CONNECT_ATTEMPTS = 3
CONNECT_S = 10.0
"""Deadline of each attempt to connect."""
REPEATABLE = frozenset(
    {
        "/v1/completions",
        "/tokenize",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/collective_rpc",  # skyrl_ping, skyrl_sync_report and skyrl_close_update
    }
)
"""POST requests that a server may receive twice. Not those that connect a sender or start, load and finish an update:
the second would fail, or wait for weights that nobody sends. aiohttp itself repeats GET requests.
"""
MAX_ERROR_TEXT = 600


class ServerUnreachableError(ConnectionError):
    """No connection to the server, or it was closed before the answer."""


class ServerError(RuntimeError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """For use in one event loop."""

    def __init__(self, url: str, api_key: str | None, max_connections: int) -> None:
        """Args: url: without a path ("http://host:8000"); max_connections: further calls wait for a free one."""
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float | None, **query: str) -> Any:
        return await self._request("GET", path, None, timeout_s, query)

    async def post(self, path: str, body: Any, timeout_s: float | None, **query: str) -> Any:
        """Return the decoded answer, or None if it is empty.
        Args: body: None for no body; timeout_s: None for no deadline.
        Raises: ServerUnreachableError, ServerError, TimeoutError.
        """
        return await self._request("POST", path, body, timeout_s, query)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(self, method: str, path: str, body: Any, timeout_s: float | None, query: dict[str, str]) -> Any:
        if self._session is None:
            # One connection per call: uvicorn silently closes those that were idle for 5 s or on which vLLM raised, and
            # a request sent at that moment would be lost.
            connector = aiohttp.TCPConnector(limit=self._max_connections, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            try:
                async with self._session.request(
                    method, self.url + path, json=body, params=query, timeout=timeout
                ) as response:
                    text = await response.text()
                    if response.status >= 400:
                        reason = _reason(text) or response.reason
                        raise ServerError(f"{method} {self.url}{path}: {response.status} {reason}", response.status)
                    return json.loads(text) if text.strip() else None
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # Nothing was sent yet: retrying repeats nothing.
                if attempt == CONNECT_ATTEMPTS:
                    raise ServerUnreachableError(f"no connection to the vLLM server {self.url}: {error}") from error
                await asyncio.sleep(0.2 * attempt)
            except TimeoutError as error:
                raise TimeoutError(f"{method} {self.url}{path} was not answered within {timeout_s:g} s") from error
            except aiohttp.ClientError as error:
                # A reset connection, as by a proxy, says nothing about the server; one that is down refuses the next.
                was_reset = isinstance(error, aiohttp.ClientConnectionError)  # before the answer began
                if was_reset and path in REPEATABLE and attempt == 1 and self._session is not None:
                    continue
                what = f"{type(error).__name__} {error}".strip()
                raise ServerUnreachableError(f"the connection to {self.url} closed during {path} ({what})") from error
            except json.JSONDecodeError as error:
                raise ServerError(f"{method} {self.url}{path}: the answer is not JSON: {text[:100]!r}") from error
        raise AssertionError("unreachable")


def _reason(text: str) -> str:
    """Message in an error's body: vLLM puts it under "error", FastAPI under "detail"."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:MAX_ERROR_TEXT]
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)[:MAX_ERROR_TEXT]
