"""Where the rows of data sources are, for errors."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
from dataclasses import dataclass

import fsspec
from datasets.data_files import resolve_pattern
from pyarrow import parquet

KNOWN = 8
"""Patterns whose numbers of rows are kept."""


@dataclass(frozen=True, slots=True)
class Files:
    """Local files of a pattern, as they were when they were read."""

    pattern: str
    state: str | None


@dataclass(frozen=True, slots=True)
class Location:
    """A row of a source; as text that of its file, which for a pattern is searched only then."""

    source: str
    unit: str
    """line (the first is 1) or row (the first is 0)."""
    index: int
    """From 0, over all files of the source."""
    files: Files | None = None

    def __str__(self) -> str:
        source, index = self.source, self.index
        left = index
        for file, num_rows in _sizes(self.files) if self.files is not None else ():
            if left < num_rows:
                source, index = file, left
                break
            left -= num_rows
        return f"{source}, {self.unit} {index + (self.unit == 'line')}"


def files_of(source: str, path: str) -> Files | None:
    """The files of a source if it is a pattern of local ones. Args: path: as it is read, escaped for a single file."""
    is_pattern = "://" not in path and glob.has_magic(source) and not os.path.isfile(os.path.expanduser(source))
    return Files(path, state_of(path)) if is_pattern else None


def state_of(path: str) -> str | None:
    """Digest of sizes and change times of local files, for the key of the cache of `datasets`: that has the path and
    the modification time alone, which a copy may keep (cp -p, rsync -t, archives).
    """
    if "://" in path:
        return None
    files = filter(os.path.isfile, sorted(glob.glob(path, recursive=True)))
    states = [(file, os.stat(file)) for file in files]
    written = repr([(file, state.st_size, state.st_ctime_ns) for file, state in states])
    return hashlib.sha256(written.encode()).hexdigest()[:16]


@functools.lru_cache(KNOWN)
def _sizes(files: Files) -> list[tuple[str, int]]:
    """Files and their numbers of rows, in the order of `datasets`; empty if they have changed or cannot be read."""
    try:
        found = [(file, _num_rows(file)) for file in resolve_pattern(files.pattern, "")]
        return found if state_of(files.pattern) == files.state else []
    except (OSError, ValueError):
        return []


def _num_rows(file: str) -> int:
    if file.endswith(".parquet"):
        return int(parquet.read_metadata(file).num_rows)
    with fsspec.open(file, "rt", compression="infer", encoding="utf-8", errors="replace") as lines:
        return sum(1 for _ in lines)


def unlike_file(files: Files | None) -> str | None:
    """The first Parquet file that cannot be read or has other columns than the first of all; None without one."""
    first = None
    for file in () if files is None else resolve_pattern(files.pattern, ""):
        try:
            schema = parquet.read_schema(file).remove_metadata()
        except (OSError, ValueError):
            return file
        first = first or (file, schema)
        if schema != first[1]:
            return f"{file}, whose columns are not those of {first[0]}"
    return None
