"""A folder that a run keeps open, so that its deletion is noticed: open files are still written, to nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors that say that the folder is not there. A file system that does not answer for a moment says others."""


class HeldFolder:
    """A folder, compared with the one that had its path when this object was created."""

    def __init__(self, path: Path, key: str, mark: str = "") -> None:
        """Args: key: of the configuration, for the message; mark: file that must stay in the folder.

        Raises: OSError.
        """
        self._path, self._key, self._mark = path, key, mark
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def problem(self) -> str | None:
        """What happened to the folder, as a sentence."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                os.stat(self._path / self._mark)
                return None
        except OSError as error:
            if error.errno not in GONE:
                return None
        return f"{self._key} is {self._path}: the folder was deleted, moved or replaced while the run used it"

    def close(self) -> None:
        """Release the folder; called once."""
        os.close(self._descriptor)
