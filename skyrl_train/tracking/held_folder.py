"""Detects the deletion of a folder in which a run has open files; writing to them would still succeed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a missing folder; a file system that is briefly unavailable gives others."""


class HeldFolder:
    """A folder that must stay the one that had its path when this object was created."""

    def __init__(self, path: Path, key: str, mark: str = "") -> None:
        """Args: key: of the configuration, for the message; mark: file that must exist in the folder.

        Raises: OSError.
        """
        self._path, self._key, self._mark = path, key, mark
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def problem(self) -> str | None:
        """The error if the folder was deleted, moved or replaced."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                os.stat(self._path / self._mark)
                return None
        except OSError as error:
            if error.errno not in GONE:
                return None
        return f"{self._key} is {self._path}: the folder was deleted, moved or replaced during the run"

    def close(self) -> None:
        """Release the folder; called once."""
        os.close(self._descriptor)
