"""Whether a folder can be written, asked before the work whose result goes there."""

from __future__ import annotations

import tempfile
from pathlib import Path


def require_writable(key: str, value: str, folder: Path, instead: str) -> None:
    """Create the folder and write into it. Args: key, value: what names it; instead: advice for the error.

    Raises: ValueError if that is impossible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{key} is {value}: nothing can be written there ({error}). {instead}") from error


def require_file(key: str, path: str | None) -> None:
    """`require_writable` for the folder of a file; nothing for None."""
    if path is not None:
        require_writable(key, path, Path(path).expanduser().resolve().parent, "Choose another file")
