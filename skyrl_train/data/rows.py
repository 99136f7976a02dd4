"""Files and hub data sets -> rows with their location."""

from __future__ import annotations

import errno
import glob
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets

from skyrl_train.config.training import DATA_FILE, HUB_SPLIT
from skyrl_train.data.location import Location, files_of, state_of, unlike_file
from skyrl_train.data.text import shortened

log = logging.getLogger(__name__)

_CONFIGS = re.compile(r"Config name is missing.*?available configs: (\[.*?\])", re.DOTALL)
"""datasets' error for a data set without a default configuration."""
MAIN = "main"
"""Configuration that is read if a data set has several, none is named and none is the default, as of openai/gsm8k."""
FULL = (errno.ENOSPC, errno.EDQUOT)
REPORT_S = 60.0
"""Seconds between lines about a data set that is not loaded yet."""
TIMEOUT = "trainer.download_timeout_s"
LocatedRow = tuple[Location, dict[str, Any]]
"""Location of a row (for errors) and its columns."""


def read_rows(sources: Sequence[str], timeout_s: float = math.inf) -> Iterator[LocatedRow]:
    """The rows of all sources in order.

    Args: sources: files (parquet, json, jsonl; also compressed, with `~`, or an address like s3://...) or
        `hub_name:split` or `hub_name:config:split`. timeout_s: of each hub data set.
    Raises: ValueError naming the file and its row (from 0) or line (from 1) if a source cannot be read or a row is
        not an object.
    """
    for source in sources:
        for where, row in _source_rows(source, timeout_s):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
            yield where, row


def without_empty_fields(messages: Any) -> Any:
    """Chat messages without fields that are None."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _of_arrow(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what Arrow adds to its messages, `tools` and variables of the template: every object gets the
    fields of all objects in the file, also the arguments of a tool call. A null that was meant there cannot be told
    from these.
    """
    is_chat = {name: name in ("tools", "chat_template_kwargs") or _has_roles(value) for name, value in row.items()}
    return {name: _without_nulls(value) if is_chat[name] else value for name, value in row.items()}


def _has_roles(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "role" in item for item in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def columns(row: dict[str, Any]) -> str:
    """Names of a row's columns, for an error."""
    return shortened(list(map(str, row)))[1:-1].replace("'", "") or "none"


def _source_rows(source: str, timeout_s: float) -> Iterator[tuple[Location, Any]]:
    if file := DATA_FILE.search(source):
        path = _existing(source)
        if file["format"] == "parquet":
            return _located(source, _load("parquet", source, data_files=path), path)
        if file["format"] == "jsonl":
            return _json_lines(source, path)
        files = [] if "://" in path else sorted(glob.glob(path, recursive=True))
        if len(files) > 1:  # each may hold an array
            return chain.from_iterable(_json_file(each, glob.escape(each)) for each in files)
        return _json_file(source, path)
    if hub := HUB_SPLIT.match(source):
        name = str(Path(hub["name"]).expanduser())
        load = partial(_load, name, source, split=hub["split"], config=hub["config"])
        return _located(source, _within(timeout_s, source, load))
    raise ValueError(
        f"data source {source!r} is neither a file (.parquet, .json, .jsonl) nor `hub_name:split`. Write it as in "
        "`org/name:train`, or `org/name:config:train`"
    )


def _located(source: str, rows: Sequence[dict[str, Any]], path: str = "") -> Iterator[LocatedRow]:
    files = files_of(source, path)
    return ((Location(source, "row", i, files), _of_arrow(row)) for i, row in enumerate(rows))


def _json_lines(source: str, path: str) -> Iterator[tuple[Location, Any]]:
    # The json reader of `datasets` 5.2 converts strings that look like dates into datetimes, fills absent keys with
    # None, and does not name the line in its errors.
    files = files_of(source, path)
    for index, row in enumerate(_load_text(source, path, "line")):
        if row["text"].strip():
            where = Location(source, "line", index, files)
            yield where, _encodable(_parse(row["text"], where), where, row["text"])


def _json_file(source: str, path: str) -> Iterator[tuple[Location, Any]]:
    text = "\n".join(row["text"] for row in _load_text(source, path, "document"))
    if not text.lstrip().startswith("["):  # many writers call JSON lines .json
        return _json_lines(source, path)
    located = ((Location(source, "row", i), row) for i, row in enumerate(_parse(text, source)))
    escapes = "\\u" if "\\u" in text else ""  # searched once, not for each row
    return ((where, _encodable(row, where, escapes)) for where, row in located)


def _parse(text: str, where: Location | str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, character {error.colno}" if "\n" in text else f"character {error.colno}"
        raise ValueError(f"{where}: invalid JSON: {error.msg} ({at})") from error
    except (ValueError, RecursionError) as error:  # a repeated key, too many digits; too deep
        raise ValueError(f"{where}: unusable JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shortened(twice)} is repeated in one object")
    return values


def _encodable(row: Any, where: Location, written: str) -> Any:
    """Return the row if all its text can be encoded: JSON can contain half of a surrogate pair.

    Args: written: the JSON source. Raises: ValueError with the text.
    """
    if "\\u" not in written:
        return row
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the text {shortened(error.object[max(0, error.start - 20) : error.end])} ends with half of a "
            "surrogate pair, which cannot be encoded. Remove it, or write the intended character"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: the row is nested too deeply") from error
    return row


def _existing(source: str) -> str:
    """The pattern of the files, with `~` expanded. Raises: ValueError for a local file that is missing or empty."""
    if "://" in source:
        return source
    path = Path(source).expanduser()
    if glob.has_magic(source) and not path.is_file():
        if not glob.glob(str(path), recursive=True):
            raise ValueError(f"data source {source}: no file matches {path.absolute()}")
        return str(path)
    if not path.is_file():
        raise ValueError(f"data file {source} does not exist ({path.absolute()})")
    if path.stat().st_size == 0:
        raise ValueError(f"data file {source} is empty")
    return glob.escape(str(path.absolute()))


def _load_text(source: str, path: str, unit: str) -> list[dict[str, Any]]:
    """The lines of a file, or its complete text. Raises: ValueError naming the line that is not UTF-8."""
    try:
        return _load("text", source, data_files=path, sample_by=unit, encoding="utf-8-sig")
    except ValueError as error:
        # datasets wraps the error, whose position is relative to a chunk of the file.
        if not isinstance(error.__cause__, Exception) or "UnicodeDecodeError" not in str(error):
            raise
        lines = _load("text", source, data_files=path, encoding_errors="replace")
        index = next(index for index, line in enumerate(lines) if "\ufffd" in line["text"])
        where = Location(source, "line", index, files_of(source, path))
        raise ValueError(f"{where}: not UTF-8. Save the file as UTF-8") from error


def _within(timeout_s: float, source: str, load: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows that `load` returns, in a thread: the library retries a silent hub for minutes, and cannot be stopped.
    Raises: ValueError after timeout_s.
    """
    future: Future[list[dict[str, Any]]] = Future()

    def work() -> None:
        try:
            future.set_result(load())
        except BaseException as error:  # raised by the waiting thread
            future.set_exception(error)

    started = time.monotonic()
    threading.Thread(target=work, name=f"load {source}", daemon=True).start()
    while (left := started + timeout_s - time.monotonic()) > 0:
        if wait([future], min(REPORT_S, left)).done:
            return future.result()
        log.info("data source %s is not loaded after %.0f s", source, time.monotonic() - started)
    raise ValueError(
        f"{TIMEOUT} is {timeout_s:g}: data source {source} was not loaded within this many seconds. Raise it, or check "
        "the network; files that are complete are not downloaded again"
    )


def _load(
    name: str, source: str, *, split: str = "train", config: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    was_quiet, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    if options:  # a local file, whose error is raised here
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        if options:
            config = state_of(options["data_files"])
        cache = None
        if not options and Path(name).is_dir():  # no name of a configuration is free, as it is for files
            state = state_of(f"{glob.escape(name)}/**")
            cache = f"{datasets.config.HF_DATASETS_CACHE}/{Path(name).resolve().name}-{state}"
        return datasets.load_dataset(name, config, split=split, cache_dir=cache, **options).to_list()
    except Exception as error:  # errors of the file system, the hub or the format
        cause = (isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__) or error
        if config is None and (choice := _CONFIGS.search(str(error))):
            names = re.findall(r"'([^']*)'", choice[1])
            several = f"the data set has several configurations ({', '.join(names)})"
            if MAIN in names:
                log.warning("data source %s: %s, and %s is read", source, several, MAIN)
                return _load(name, source, split=split, config=MAIN, **options)
            written = ", ".join(f"{source.rpartition(':')[0]}:{each}:{split}" for each in names)
            raise ValueError(f"data source {source} cannot be read: {several}. Write one of {written}") from error
        if name == "parquet" and (file := unlike_file(files_of(source, options["data_files"]))):
            source = f"{source} ({file})"
        remedy = _remedy(cause, None if not options else Path(options["data_files"]).name)
        raise ValueError(f"data source {source} cannot be read: {type(cause).__name__}: {cause}{remedy}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not was_quiet:
            datasets.enable_progress_bars()


def _remedy(error: BaseException, file: str | None) -> str:
    """Sentence for an error of the hub or of the cache of `datasets`. Args: file: name of a local one."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    is_full = isinstance(error, OSError) and (error.errno in FULL or "disk space" in str(error))
    if is_full or Path(str(getattr(error, "filename", None) or "")).is_relative_to(cache):
        return f". Rows are cached in {cache}: check the space and permissions there, or set HF_DATASETS_CACHE"
    if file is None and isinstance(error, ConnectionError | FileNotFoundError):
        return ". Check the name, the network and, for a private or gated data set, HF_TOKEN"
    return ""
