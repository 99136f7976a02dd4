"""Overrides on a command line: their errors, and the line that Hydra gets for each."""

from __future__ import annotations

import dataclasses
import re
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


def parse(text: str, schema: type | None = None) -> Override:
    """An override. Args: schema: to find the free-form keys, below which a name may be `module:attribute`.

    Raises: ConfigError.
    """
    try:
        return OverridesParser.create().parse_override(text if schema is None else _nested(text, schema))
    except HydraException as error:
        shown, reason = BY_NAME.argument(text), f"{str(error).splitlines()[0]}. "
        if shown != text:  # the reason quotes a part of the secret
            reason = ""
        raise ConfigError(
            f"cannot read {shown!r} on the command line, expected key=value: {reason}Put quotes around a value with "
            "other than letters, digits and . / : _ -, inside those of the shell, as in \"key='a,b c'\""
        ) from None


def _nested(text: str, schema: type) -> str:
    """`KEY.module:attribute.name=value` with the name in a mapping, since Hydra's grammar has no colons in keys."""
    key, equals, value = text.partition("=")
    if not equals or ":" not in key:
        return text
    for section, kind in key_types(schema).items():
        if not is_free_form(kind):
            continue
        match = re.fullmatch(rf"\+{{0,2}}{re.escape(section)}\.([\w.]+:\w+)((?:\.\w+)*)", key)
        if match is not None:
            names = [_mapping_key(match[1]), *match[2].split(".")[1:]]
            return f"++{section}=" + "".join(f"{{{name}:" for name in names) + value + "}" * len(names)
    return text


def is_searchpath(override: Override) -> bool:
    return override.key_or_group == "hydra.searchpath"


def strings(override: Override) -> list[str]:
    value = override.value()
    if not isinstance(value, list):
        raise ConfigError(f"hydra.searchpath is {value!r}: it must be a list. Write [file:///folder]")
    return [str(item) for item in value]


def literal(value: Any) -> str:
    """A value as the text of an override; text is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_mapping_key(str(key))}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
        return f"'{escaped}'"
    return repr(value)


def escaped(value: Any) -> Any:
    """A value in which OmegaConf reads each `${` as text."""
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _mapping_key(name: str) -> str:
    return re.sub(r"([^\w.-])", r"\\\1", name)


def _below_free_form(path: str, kinds: Mapping[str, Any]) -> bool:
    parts = path.split(".")
    return any(is_free_form(kinds.get(".".join(parts[:n]))) for n in range(1, len(parts)))


def is_known(path: str, kinds: Mapping[str, Any]) -> bool:
    """Whether the schema has the key, or it is below a free-form one."""
    return path in kinds or _below_free_form(path, kinds)


def problem(override: Override, schema: type, folders: Sequence[Path]) -> str | None:
    key, text = override.key_or_group, BY_NAME.argument(str(override.input_line))
    kinds = key_types(schema)
    if override.is_sweep_override():
        quoted = f"'{key}=\"...\"'"
        return f"{text}: sweeps are not supported. Start one run per value, or quote a text with commas: {quoted}"
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


def selected_twice(overrides: Sequence[Override]) -> list[str]:
    """A problem for each group of which several files are selected one by one."""
    chosen: dict[str, list[str]] = {}
    for override in overrides:
        if override.is_add() and "." not in override.key_or_group and isinstance(override.value(), str):
            chosen.setdefault(override.key_or_group, []).append(str(override.value()))
    return [
        f"+{group} is given {len(names)} times. Choose one, or combine them, the last one wins: "
        f"'+{group}=[{','.join(names)}]'"
        for group, names in chosen.items()
        if len(names) > 1
    ]


def hydra_line(override: Override, schema: type) -> str:
    """The override for Hydra: known keys with or without `+`, keys of a free-form mapping whether they exist or not."""
    line, kinds = str(override.input_line), key_types(schema)
    if override.is_delete():
        return line
    if _below_free_form(override.key_or_group, kinds) or is_free_form(kinds.get(override.key_or_group)):
        return "++" + line.lstrip("+")
    return line.lstrip("+") if override.key_or_group in kinds else line
