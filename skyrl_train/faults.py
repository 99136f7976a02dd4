"""Faults of users' own code: its name, and where it raised."""

from __future__ import annotations

import sysconfig
import traceback
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parent)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def name_of(made: Any) -> str:
    """A function, class or callable object as `module:name`."""
    while isinstance(made, partial):
        made = made.func
    if not hasattr(made, "__qualname__"):
        made = type(made)
    return f"{made.__module__}:{made.__qualname__}"


def is_of_package(made: object) -> bool:
    """Whether a function or class is this package's."""
    return str(getattr(made, "__module__", "")).partition(".")[0] == "skyrl_train"


def described(error: BaseException, caller: str) -> str:
    """An error of own code with its type and line. Args: caller: like `where`."""
    return f"{type(error).__name__}: {error}{where(error, caller)}"


def where(error: BaseException, caller: str) -> str:
    """Innermost line of own code, or else of a library. Args: caller: file that called it, which does not count."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != caller]
    outside = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<"))]
    own = [frame for frame in outside if not frame.filename.startswith(LIBRARIES)]
    chosen = own or outside or frames
    return f" ({chosen[-1].filename}:{chosen[-1].lineno})" if chosen else ""


def passes(error: BaseException, file: str) -> bool:
    """Whether the error comes out of a function of the file."""
    return any(frame.filename == file for frame in traceback.extract_tb(error.__traceback__))
