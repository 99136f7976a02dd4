"""Overrides on a command line: their errors, and the line that Hydra gets for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.files import dotted_keys
from skyrl_train.config.redaction import BY_NAME
from skyrl_train.config.schema import field_types, is_free_form, key_types, unknown_key


def parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        shown, reason = BY_NAME.argument(text), str(error).splitlines()[0]
        if shown != text:  # the reason quotes a part of the secret
            reason = "put quotes around the value, inside those of the shell, as in \"key='a,b c'\""
        raise ConfigError(f"cannot read {shown!r} on the command line, expected key=value: {reason}") from None


def is_searchpath(override: Override) -> bool:
    return override.key_or_group == "hydra.searchpath"


def strings(override: Override) -> list[str]:
    value = override.value()
    if not isinstance(value, list):
        raise ConfigError(f"hydra.searchpath is {value!r}: it must be a list. Write [file:///folder]")
    return [str(item) for item in value]


def quoted_list(items: Sequence[str]) -> str:
    return "[" + ",".join("'" + item.replace("'", "\\'") + "'" for item in items) + "]"


def _below_free_form(path: str, kinds: Mapping[str, Any]) -> bool:
    parts = path.split(".")
    return any(is_free_form(kinds.get(".".join(parts[:n]))) for n in range(1, len(parts)))


def problem(override: Override, schema: type, folders: Sequence[Path]) -> str | None:
    key, text = override.key_or_group, BY_NAME.argument(str(override.input_line))
    kinds = key_types(schema)
    if override.is_sweep_override():
        return f"{text}: sweeps are not supported. Start one run per value"
    if is_searchpath(override) or _below_free_form(key, kinds):
        return None
    if key == "hydra" or key.startswith("hydra."):
        return f"{text}: hydra.* settings are not supported, except hydra.searchpath. Output goes to trainer.run_dir"
    is_group = "." not in key and key not in kinds and any((folder / key).is_dir() for folder in folders)
    if is_group and not (override.is_add() and not override.is_force_add()) and not override.is_delete():
        return f"{text}: a group is selected with a plus sign. Write +{text.lstrip('+')}"
    if is_group:
        return None
    if key not in kinds:
        return unknown_key(key, schema) + " (on the command line)"
    if override.is_delete():
        return f"{text}: keys cannot be deleted. Set a value"
    if not dataclasses.is_dataclass(kinds[key]):
        return None
    value = override.value()
    if not isinstance(value, dict):
        return f"{text}: {key} is a section. Set one of its keys: {', '.join(field_types(kinds[key]))}"
    unknown = [path for path in dotted_keys(schema, value, f"{key}.") if path not in kinds]
    return unknown_key(unknown[0], schema) + " (on the command line)" if unknown else None


def hydra_line(override: Override, schema: type) -> str:
    """The override for Hydra: known keys with or without `+`, keys of a free-form mapping whether they exist or not."""
    line, kinds = str(override.input_line), key_types(schema)
    if override.is_delete():
        return line
    if _below_free_form(override.key_or_group, kinds) or is_free_form(kinds.get(override.key_or_group)):
        return "++" + line.lstrip("+")
    return line.lstrip("+") if override.key_or_group in kinds else line
