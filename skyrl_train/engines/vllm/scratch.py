"""Folder of the sockets and temporary files of an engine's processes, which vLLM (0.26 to 0.33) never removes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import uuid
from pathlib import Path

PREFIX = "skyrl_engine_"
LOCK = ".lock"
SOCKET_NAME = 1 + 36
"""Characters of a socket's name in the folder."""
LONGEST_PATH = 107
"""Linux's limit for the path of a socket."""
VARIABLES = ("TMPDIR", "VLLM_RPC_BASE_PATH")


class Scratch:
    """Folder of this process and its children. Its lock ends with the process, however that ends; the next engine on
    the node then removes the folder.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{PREFIX}{uuid.uuid4().hex[:8]}"
        self._users = 0
        self._lock = -1
        self._before: dict[str, str | None] = {}

    def enter(self) -> None:
        """Create temporary files in the folder from now on, until `leave` was called as often."""
        self._users += 1
        if self._users > 1:
            return
        remove_abandoned(self.path.parent)
        draft = self.path.with_name(f".{self.path.name}")  # visible to others only once locked
        draft.mkdir(mode=0o700)
        self._lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path)
        self._before = {name: os.environ.get(name) for name in VARIABLES}
        os.environ |= dict.fromkeys(VARIABLES, str(self.path))
        tempfile.tempdir = None  # read TMPDIR again

    def leave(self) -> None:
        """Remove the folder after its last engine."""
        self._users -= 1
        if self._users:
            return
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@functools.cache
def scratch() -> Scratch:
    """The folder of this process; always the same, because vLLM caches its path."""
    parent = Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())
    longest = len(str(parent)) + 1 + len(PREFIX) + 8 + SOCKET_NAME
    return Scratch(parent if longest <= LONGEST_PATH else Path("/tmp"))


def remove_abandoned(parent: Path) -> None:
    """Remove folders of this user's engines whose processes ended without doing so."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another engine is removing it
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
