"""vLLM servers as docs/remote_engines.md starts them, and weights sent to one by a test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.engines.remote.engine import RemoteEngine
from skyrl_train.ranks import free_port
from skyrl_train.weight_sync.control import ControlMessage
from tests.support.jobs import ROOT
from tests.support.sending import Named, specs_of

KEY = "of-the-test"
START_S = 200


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> Server:
        """Returns: itself, once it is up."""
        deadline = time.monotonic() + START_S
        while not self._is_up():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.2)
        return self

    def _is_up(self) -> bool:
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")


@contextmanager
def vllm_server(model: Path, log: Path, environment: dict[str, str], **arguments: object) -> Iterator[Server]:
    """Starts, and runs until the block ends; with the API key KEY and the calls of a weight update open."""
    port = free_port()
    arguments = {"model": model, "host": "127.0.0.1", "port": port, "api_key": KEY, **arguments}
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | environment | {"PYTHONPATH": paths, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


class Posted:
    """A sender in a thread hands messages to an engine in this event loop."""

    def __init__(self, engine: RemoteEngine, message: ControlMessage, loop: asyncio.AbstractEventLoop) -> None:
        self._future = asyncio.run_coroutine_threadsafe(engine.update_weights(message | {"sender": "test"}), loop)

    def check(self) -> None:
        if self._future.done():
            self._future.result()

    def wait(self) -> None:
        self._future.result(60)


async def connect(engine: RemoteEngine, sender: Any, named_tensors: Named) -> None:
    """Args: named_tensors: those of each update."""
    specs = [spec.to_message() for spec in specs_of(named_tensors)]
    info = {"sender": "test", "weight_sync_timeout_s": 60, "rank_offset": 1, "specs": specs}
    await asyncio.gather(engine.init_weight_sync(sender.init_info | info), asyncio.to_thread(sender.connect))
