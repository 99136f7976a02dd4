"""Data set rows -> Prompts."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from skyrl_train.config_checks import DATA_FILE, HUB_SPLIT
from skyrl_train.data.chat import ChatTemplate, check_messages
from skyrl_train.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LocatedRow = tuple[str, Any]
"""Where the row stands (for errors) and the row as it was read."""


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    prompts: list[Prompt]
    num_dropped: int
    """Rows whose prompt has more than `max_prompt_length` tokens."""


def load_prompts(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    default_env_class: str,
    chat_template_kwargs: Mapping[str, Any],
) -> LoadedPrompts:
    """The rows of all sources in order, without those whose prompt is too long.

    Args: sources are files (parquet, json, jsonl; also compressed, `~`, or an address like s3://...) or
        `hub_name:split`. A row's uid is its index over all sources, dropped rows counted, so it does not depend on
        max_prompt_length.
    Raises: ValueError naming the source and the row (numbered from 0; of JSON lines the line, numbered from 1) if a
        source is missing or unreadable or a row is malformed; ValueError if no row is left.
    """
    prompts = [
        _prompt(row, where, uid=str(index), default_env_class=default_env_class)
        for index, (where, row) in enumerate(row for source in sources for row in _read_rows(source))
    ]
    lengths = ChatTemplate(tokenizer, chat_template_kwargs).prompt_lengths([prompt.messages for prompt in prompts])
    kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length]
    if not kept:
        shortest = f"the shortest prompt has {min(lengths)}" if lengths else "there are no rows"
        raise ValueError(
            f"no prompt of {', '.join(sources)} has at most trainer.max_prompt_length={max_prompt_length} tokens "
            f"({shortest})"
        )
    return LoadedPrompts(prompts=kept, num_dropped=len(prompts) - len(kept))


def _prompt(row: Any, where: str, *, uid: str, default_env_class: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
    if row.get("prompt") is None:
        raise ValueError(f"{where}: no `prompt`; the columns are {', '.join(map(str, row)) or 'none'}")
    try:
        messages = check_messages(_without_empty_fields(row["prompt"]))
    except ValueError as error:
        raise ValueError(f"{where}: bad `prompt`: {error}") from error
    if not messages:
        raise ValueError(f"{where}: `prompt` has no messages")
    for column, kind in (("env_class", str), ("data_source", str), ("reward_spec", dict)):
        value = row.get(column)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{where}: `{column}` must be a {kind.__name__}, got {type(value).__name__} {value!r}")
    return Prompt(
        uid=uid,
        messages=messages,
        env_class=row.get("env_class") or default_env_class,
        extras={key: value for key, value in row.items() if key not in ("prompt", "env_class")},
        data_source=row.get("data_source") or "unknown",
    )


def _without_empty_fields(messages: Any) -> list[Message] | Any:
    """Parquet gives every message all the fields that any message of the file has, as None."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _read_rows(source: str) -> Iterator[LocatedRow]:
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


def _json_lines(source: str, path: str) -> Iterator[LocatedRow]:
    # As text, not with the json reader of `datasets`: that one turns a string that looks like a date into a datetime,
    # fills absent keys with None, and its errors do not name the line (datasets 5.2).
    for number, row in enumerate(_load("text", source, data_files=path), start=1):
        if row["text"].strip():
            yield f"{source}, line {number}", _parse(row["text"], f"{source}, line {number}")


def _json_file(source: str, path: str) -> Iterator[LocatedRow]:
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
