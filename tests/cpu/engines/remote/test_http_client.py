"""The client of vLLM servers, and connections that they end."""

from __future__ import annotations

import asyncio

import pytest

from skyrl_train.engines.remote.client import ServerClient, ServerError

ANSWER = b'HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"error": "full"}'


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
