"""JSON lines files that survive a full disk and a killed process."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class JsonLinesWriter:
    """Appends one object per line, unbuffered, so that lines are visible at once and survive the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._unwritten = b"" if _ends_a_line(path) else b"\n"

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`; NaN and infinities become null. A deleted file is created again, with a warning.

        Raises: OSError, e.g. for a full disk or a deleted folder. The rest of the line is written before the next one,
        so every line is complete once the disk has room.
        """
        self._unwritten += json_line(row)
        if not self._path.exists():
            created = self._path.open("ab", buffering=0)
            self._file.close()
            self._file = created
            log.warning("%s was deleted during the run: its earlier lines are lost", self._path)
        while self._unwritten:
            written = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[written or 0 :]

    def close(self) -> None:
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    """False after an earlier process wrote part of its last line."""
    with path.open("rb") as file:
        if not file.seek(0, io.SEEK_END):
            return True
        file.seek(-1, io.SEEK_END)
        return file.read() == b"\n"


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line; NaN and infinities become null, numbers of numpy and torch numbers, and other objects text. Half of a
    surrogate pair, which is no UTF-8, is escaped.
    """
    text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False, default=_plain)
    return text.encode(errors="backslashreplace") + b"\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a truncated line (its writer was killed) is skipped with a warning."""
    return [row for _, row in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset of its line in the file, object), with one line in memory; a truncated line is skipped."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield offset, json.loads(line)
            except ValueError:
                log.warning("%s: skipping truncated line %d", path, number)
            offset += len(line)


def _plain(value: Any) -> Any:
    """A number or list of numbers as such, anything else as text."""
    return _without_nan(value.tolist()) if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
