"""A quick start of an engine's core process, which ends with its parent.

A process that multiprocessing spawns first runs the parent's `__main__` (in a Ray actor: Ray's worker), and vLLM (0.32)
has no hook before its core is imported. So the core runs this module instead: 5 s of CPU instead of 8.

It still imports what its parent has imported, one after the other: 11 of 42 s in which an engine starts on a GPU and a
host with slow cores. A `WaitingCore` imports vLLM while its parent does, and becomes the core that vLLM spawns.

The core keeps its device while it waits for requests. Ray ends the children of an actor that is killed, but not when
Ray's own processes end first: if its control store (GCS) dies, all of them do.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import spawn, util
from typing import Any

from skyrl_train.imports import quick_imports

POLL_S = 1.0
MAX_BYTES = 1 << 20
"""Bytes of a message; sockets (Linux) take a fifth of it at once, and reject more."""
READ_ONCE = ("LD_PRELOAD", "PYTHON", "OMP_", "KMP_", "MKL_", "MALLOC_", "VLLM_USE_BREAKABLE_CUDAGRAPH")
"""Prefixes of variables that a process reads when it starts or imports vLLM (0.26 to 0.33), and that others may set in
between. LD_LIBRARY_PATH is another, but opencv adds its own folder to it when it is imported.
"""
LIBRARIES_OF_CUDA = "VLLM_ENABLE_CUDA_COMPATIBILITY"
"""With this variable vLLM adds to LD_LIBRARY_PATH what its core needs."""


class WaitingCore:
    """A child that imports vLLM now, and later becomes a process that multiprocessing spawns."""

    def __init__(self) -> None:
        self._environment, self._executable = dict(os.environ), os.fsencode(spawn.get_executable())
        # A message of this kind keeps its bounds.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import wait; "
            program += f"wait({theirs.fileno()}, {os.getpid()})"
            command = [*spawn.get_command_line()[:-2], program, "--multiprocessing-fork"]
            self.pid: int = util.spawnv_passfds(self._executable, command, [theirs.fileno()])

    def become(self, path: bytes, command: Sequence[Any], files: Sequence[int]) -> int | None:
        """Run what multiprocessing would in a new process. Returns: the child's id; None if it must be a new one."""
        numbers = re.search(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", str(command))
        changed = {name for name, _ in self._environment.items() ^ os.environ.items()}
        # vLLM's wrapper of NUMA nodes is another executable. A process knows further files by their numbers.
        if os.fsencode(path) != self._executable or numbers is None or len(files) != 3:
            return None
        if any(name.startswith(READ_ONCE) for name in changed):
            return None
        tracker, pipe = map(int, numbers.groups())
        message = json.dumps(dict(os.environ)).encode()
        try:
            socket.send_fds(self._socket, [message], [tracker, pipe, *{*files} - {tracker, pipe}])
        except OSError:  # the child has ended
            return None
        self._socket.close()
        return self.pid

    def dismiss(self) -> None:
        """Let the child end, once it has imported vLLM."""
        self._socket.close()
        threading.Thread(target=os.waitpid, args=(self.pid, 0), daemon=True).start()


def wait(number: int, parent_id: int) -> None:
    """Body of a WaitingCore, which ends with its parent. Args: number: of the socket to that."""
    with quick_imports():
        import vllm.v1.engine.core
        import vllm.v1.worker.gpu_worker  # noqa: F401
    with socket.socket(fileno=number) as parent:
        message, files, _, _ = socket.recv_fds(parent, MAX_BYTES, 3)
    if not message or os.getppid() != parent_id:
        return
    os.environ.clear()
    os.environ.update(json.loads(message))
    tempfile.tempdir = None  # read TMPDIR again
    del sys.modules[__name__]  # multiprocessing runs it as the main module
    spawn.spawn_main(tracker_fd=files[0], pipe_handle=files[1])


_waiting: list[WaitingCore] = []


def prepare_core() -> None:
    """Start a WaitingCore for the first core that this process spawns."""
    if not _waiting and "vllm" not in sys.modules and LIBRARIES_OF_CUDA not in os.environ:
        _waiting.append(WaitingCore())


@contextlib.contextmanager
def quick_core_start() -> Iterator[None]:
    """Have processes that are spawned in this block run this module instead of `__main__`, the first of them in a
    WaitingCore if there is one.
    """
    main, new_process = sys.modules["__main__"], util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        is_core = "spawn_main" in str(args)  # else multiprocessing's own process for its resources
        if is_core and _waiting and (core := _waiting[0].become(path, args, passfds)) is not None:
            _waiting.clear()
            return core
        return new_process(path, args, passfds)

    sys.modules["__main__"] = sys.modules[__name__]
    util.spawnv_passfds = spawnv_passfds
    try:
        yield
    finally:
        sys.modules["__main__"], util.spawnv_passfds = main, new_process
        while _waiting:
            _waiting.pop().dismiss()


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


if __name__ == "__mp_main__":
    _end_with_parent()
    with quick_imports():
        import vllm.v1.engine.core  # noqa: F401
