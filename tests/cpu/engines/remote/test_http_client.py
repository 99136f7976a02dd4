"""The client of vLLM servers, and connections that they end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from skyrl_train.engines.remote.client import ServerClient, ServerError, ServerUnreachableError

ANSWER = b'HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"error": "full"}'
BEGIN = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"


async def fail_once_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What uvicorn does where an exception is answered with a 500: the answer says nothing of the connection's end, and
    a request that comes on it after all is lost."""
    for closes in (False, True):
        await reader.readuntil(b"\r\n\r\n")
        if closes:
            break
        writer.write(ANSWER)
    writer.close()


def test_a_connection_on_which_a_server_failed_is_not_used_again():
    async def main() -> None:
        server = await asyncio.start_server(fail_once_and_close, "127.0.0.1", 0)
        client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 1)
        for _ in range(3):
            with pytest.raises(ServerError, match="500"):
                await client.post("/start_weight_update", None, 5.0)
        await client.close()
        server.close()

    asyncio.run(main())


def resets(num_resets: int, begins: bytes = b"") -> tuple[list[str], Callable[..., Awaitable[None]]]:
    """A server that resets its first connections after their request, and then answers. Returns: paths of its requests.
    Args: begins: what it answers before a reset.
    """
    paths: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        if len(paths) <= num_resets:
            writer.write(begins)
            if not begins:
                linger = struct.pack("ii", 1, 0)  # close with a reset
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            writer.write(BEGIN + b'"text": ""}')
        writer.close()

    return paths, serve


def asked(serve: Callable[..., Awaitable[None]], method: str, path: str) -> Any:
    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 1)
        try:
            return await (client.get(path, 5.0) if method == "GET" else client.post(path, None, 5.0))
        finally:
            await client.close()
            server.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/pause"), ("POST", "/collective_rpc")],
)
def test_a_request_whose_connection_was_reset_once_is_repeated_where_that_changes_nothing(method: str, path: str):
    paths, serve = resets(1)
    assert asked(serve, method, path) == {"text": ""} and paths == [path] * 2
    paths, serve = resets(2)
    with pytest.raises(ServerUnreachableError, match=f"closed during {path}"):
        asked(serve, method, path)
    assert paths == [path] * 2


@pytest.mark.parametrize(
    ("path", "begins"),
    [("/start_weight_update", b""), ("/update_weights", b""), ("/v1/completions", BEGIN)],
)
def test_steps_of_an_update_and_answers_that_have_begun_are_not_repeated(path: str, begins: bytes):
    paths, serve = resets(1, begins)
    with pytest.raises(ServerUnreachableError, match=f"closed during {path}"):
        asked(serve, "POST", path)
    assert paths == [path]
