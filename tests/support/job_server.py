"""Driver processes of jobs, forked from one process that has imported what all of them import: 0.1 s instead of 7 s of
CPU time each.

A forked driver is what `python -m MODULE` starts: a session and a process group of its own, its own folder, variables
and output, and the module's code run as `__main__`. Only the start of the interpreter and the imports are shared.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "skyrl_train.checks.rl",
    "skyrl_train.checks.sft",
    "skyrl_train.entrypoints.command",
    "skyrl_train.entrypoints.experiment",
    "skyrl_train.entrypoints.sft_run",
    "skyrl_train.tracking.report.figure",
)
READ_AT_IMPORT = ("RAY_", "HF_", "TRANSFORMERS_", "OMP_", "TORCH", "MPL")
"""Prefixes of variables that the preloaded modules have read."""
POLL_S = 0.02


class Forked:
    """A forked driver, with the methods of `subprocess.Popen` that jobs use."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code = code

    def poll(self) -> int | None:
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class JobServer:
    """Starts on the first job, ends with `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._read: dict[str, str] | None = None
        """Variables that the preloaded modules have read."""

    def can_start(self, env: dict[str, str]) -> bool:
        """Whether modules that were imported with `env` would be the preloaded ones."""
        return _read_at_import(env) == (_read_at_import(_variables()) if self._read is None else self._read)

    def start(self, module: str, arguments: Sequence[str], cwd: Path, env: dict[str, str], output: Path) -> Forked:
        """Run `python -m module arguments`. Args: output: file of stdout and stderr."""
        if self._socket is None:
            self._socket = self._started()
        output.write_bytes(b"")  # a job is asked for its output before it writes any
        code = output.with_suffix(".code")
        request = {"argv": [module, *arguments], "cwd": str(cwd), "env": env, "output": str(output), "code": str(code)}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return Forked(int(self._socket.recv(64)), code)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command, variables = [sys.executable, "-m", __name__, str(theirs.fileno())], _variables()
        self._process = subprocess.Popen(command, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()])
        self._read = _read_at_import(variables)
        theirs.close()
        return ours

    def close(self) -> None:
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.wait(60)
        self._process = self._socket = None


SERVER = JobServer()


def _variables() -> dict[str, str]:
    """Ray's name the cluster that a process belongs to."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _read_at_import(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}


def serve(connection: socket.socket) -> None:
    """Fork a driver for each line of JSON, until the other end is closed."""
    codes: dict[int, str] = {}
    requests = connection.makefile("rb")
    while True:
        ready, _, _ = select.select([connection], [], [], POLL_S if codes else None)
        if ready:
            if not (line := requests.readline()):
                return
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                os.close(connection.fileno())
                run(**request)
            codes[pid] = request["code"]
            connection.sendall(str(pid).encode())
        while codes and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            written = Path(codes.pop(ended[0]))
            part = written.with_suffix(".part")
            part.write_text(str(os.waitstatus_to_exitcode(ended[1])))
            part.rename(written)


def run(argv: list[str], cwd: str, env: dict[str, str], output: str, code: str) -> NoReturn:
    """Become `python -m argv`, and end like it, without taking apart what was imported."""
    os.setsid()
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *env["PYTHONPATH"].split(os.pathsep)]
    sys.argv = list(argv)
    status = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    for name in PRELOADED:
        __import__(name)
    gc.freeze()
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
