"""Files and hub data sets -> rows, each with the place where it stands."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from skyrl_train.checks.training import DATA_FILE, HUB_SPLIT

LocatedRow = tuple[str, dict[str, Any]]
"""Where the row stands (for errors) and its columns."""


def read_rows(sources: Sequence[str]) -> Iterator[LocatedRow]:
    """The rows of all sources in order.

    Args: sources are files (parquet, json, jsonl; also compressed, `~`, or an address like s3://...) or
        `hub_name:split`.
    Raises: ValueError naming the source and the row (numbered from 0; of JSON lines the line, numbered from 1) if a
        source is missing or unreadable or a row is no object.
    """
    for source in sources:
        for where, row in _source_rows(source):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
            yield where, row


def without_empty_fields(messages: Any) -> Any:
    """Chat messages without their empty fields: parquet gives every message all the fields that any message of the
    file has, as None."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _source_rows(source: str) -> Iterator[tuple[str, Any]]:
    if file := DATA_FILE.search(source):
        path = _existing(source)
        if file["format"] == "parquet":
            return ((f"{source}, row {i}", row) for i, row in enumerate(_load("parquet", source, data_files=path)))
        return _json_lines(source, path) if file["format"] == "jsonl" else _json_file(source, path)
    if hub := HUB_SPLIT.match(source):
        rows = _load(str(Path(hub["name"]).expanduser()), source, split=hub["split"])
        return ((f"{source}, row {i}", row) for i, row in enumerate(rows))
    raise ValueError(
        f"data source {source!r} is neither a file (.parquet, .json, .jsonl) nor `hub_name:split` (as in "
        "`org/name:train`)"
    )


def _json_lines(source: str, path: str) -> Iterator[tuple[str, Any]]:
    # As text, not with the json reader of `datasets`: that one turns a string that looks like a date into a datetime,
    # fills absent keys with None, and its errors do not name the line (datasets 5.2).
    for number, row in enumerate(_load("text", source, data_files=path), start=1):
        if row["text"].strip():
            yield f"{source}, line {number}", _parse(row["text"], f"{source}, line {number}")


def _json_file(source: str, path: str) -> Iterator[tuple[str, Any]]:
    text = "\n".join(row["text"] for row in _load("text", source, data_files=path, sample_by="document"))
    if not text.lstrip().startswith("["):  # many writers call JSON lines .json
        return _json_lines(source, path)
    return ((f"{source}, row {i}", row) for i, row in enumerate(_parse(text, source)))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, character {error.colno}" if "\n" in text else f"character {error.colno}"
        raise ValueError(f"{where}: not valid JSON: {error.msg} ({at})") from error


def _existing(source: str) -> str:
    """The path with `~` replaced. Raises: ValueError if it is a local file that is missing or empty."""
    if "://" in source:
        return source
    path = Path(source).expanduser()
    if not glob.has_magic(source):
        if not path.is_file():
            raise ValueError(f"data file {source} does not exist (looked at {path.absolute()})")
        if path.stat().st_size == 0:
            raise ValueError(f"data file {source} is empty")
    return str(path)


def _load(name: str, source: str, *, split: str = "train", **options: Any) -> list[dict[str, Any]]:
    was_quiet = datasets.are_progress_bars_disabled()
    if options:  # a file, read in an instant
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, split=split, **options).to_list()
    except Exception as error:  # whatever the file system, the hub or the format raises
        cause = error.__cause__ or error
        raise ValueError(f"data source {source} cannot be read: {type(cause).__name__}: {cause}") from error
    finally:
        if not was_quiet:
            datasets.enable_progress_bars()
