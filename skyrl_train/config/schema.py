"""Nested dictionaries -> frozen dataclasses, strictly, with every problem of a configuration in one error.

Fields of a schema are dataclasses (sections), `str`, `int`, `float`, `bool`, `tuple[X, ...]`, `tuple[X, Y]`,
`dict[str, Any]` (free-form, unchecked), one of these `| None`, or `Annotated` with a rule of values.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.redaction import BY_NAME, is_masked
from skyrl_train.config.skyrl_04.table import table
from skyrl_train.spelling import is_misspelling

T = TypeVar("T")
MISSPELT = 0.8
"""Least similarity of the last name to the one that is suggested: another word is another key, not a misspelling."""


@functools.cache  # evaluating annotations took a fifth of the time of reading a configuration
def field_types(schema: type) -> Mapping[str, Any]:
    """Field name -> type, in the order of the class."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(schema)}


@functools.cache
def key_types(schema: type, prefix: str = "") -> Mapping[str, Any]:
    """Dotted path of every section and key -> its type: `{"trainer": TrainerConfig, "trainer.seed": int, ...}`."""
    found: dict[str, Any] = {}
    for name, kind in field_types(schema).items():
        found[prefix + name] = kind
        if dataclasses.is_dataclass(kind):
            found |= key_types(typing.cast(type, kind), f"{prefix}{name}.")
    return found


def is_free_form(kind: Any) -> bool:
    """Whether a key of this type takes any keys below it."""
    return typing.get_origin(kind) is dict


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _rule(kind: Any) -> Any:
    """Rule of values.py of an `Annotated` type, or None."""
    return kind.__metadata__[0] if typing.get_origin(kind) is typing.Annotated else None


def rules(kind: Any) -> list[Any]:
    """Every rule within a type."""
    own = [] if _rule(kind) is None else [_rule(kind)]
    return own + [rule for part in typing.get_args(kind) for rule in rules(part)]


def type_name(kind: Any) -> str:
    """Name of a type for messages: `int`, `list of str`, `float or null`."""
    if kind is type(None):
        return "null"
    if _rule(kind) is not None:
        return type_name(kind.__origin__)
    if _is_union(kind):
        return " or ".join(type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        return f"list of {type_name(parts[0])}" if parts[-1] is ... else f"list of {len(parts)} {type_name(parts[0])}"
    if is_free_form(kind) or dataclasses.is_dataclass(kind):
        return "mapping of keys to values"
    return kind.__name__


def unknown_key(path: str, schema: type) -> str:
    """The error for an unknown key: what a key of skyrl_train 0.4 is here; for a misspelt one the right one; else six
    keys of its section.

    The last name counts twice, the path once, so a right name in a wrong or misspelt section is found.
    """
    if (said := table().hint(path)) is not None:
        return f"unknown key {path}: {said}"
    kinds = key_types(schema)
    leaf = path.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        return difflib.SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio()

    def score(candidate: str) -> float:
        return 2 * likeness(candidate) + difflib.SequenceMatcher(None, path, candidate).ratio()

    possible = [each for each in kinds if is_misspelling(leaf, each.rpartition(".")[2]) and likeness(each) >= MISSPELT]
    best = max(possible, key=score, default=None)
    if best is not None and score(best) >= 1.9:
        return f"unknown key {path}: did you mean {best}?"
    section = path.rpartition(".")[0]
    while section and not dataclasses.is_dataclass(kinds.get(section)):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    names = sorted(field_types(kinds[section] if section else schema), key=lambda name: -score(prefix + name))
    more = ", ..." if len(names) > 6 else ""
    return f"unknown key {path}: {section or 'the top level'} has {', '.join(names[:6])}{more}"


def build(schema: type[T], plain: Mapping[str, Any], where: Callable[[str], str] = lambda path: "") -> T:
    """`plain` as an instance of `schema`.

    Args: where(dotted path): origin of a value, such as ` (in my.yaml)`, or "".
    Raises: ConfigError with every unknown key, missing key and wrong value at once.
    """
    problems: list[str] = []

    def report(path: str, problem: str) -> None:
        problems.append(problem + where(path))

    value = _section(schema, plain, "", schema, report)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, value)


def _section(kind: type, value: Any, path: str, schema: type, report: Callable[[str, str], None]) -> Any:
    if not isinstance(value, Mapping):
        report(path, f"{path} is {value!r}: expected a {type_name(kind)}")
        return None
    prefix = f"{path}." if path else ""
    kinds = field_types(kind)
    for name in value:
        if name not in kinds:
            report(f"{prefix}{name}", unknown_key(f"{prefix}{name}", schema))
    fields = {}
    for name, field_kind in kinds.items():
        if name not in value:
            report(f"{prefix}{name}", f"{prefix}{name} is missing")
        else:
            fields[name] = _value(field_kind, value[name], f"{prefix}{name}", schema, report)
    return kind(**fields) if len(fields) == len(kinds) else None


def _value(kind: Any, value: Any, path: str, schema: type, report: Callable[[str, str], None]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _section(typing.cast(type, kind), value, path, schema, report)
    shown = BY_NAME.plain(value, path)
    try:
        _require_given(value)
        return _plain(kind, value)
    except ValueError as error:
        report(path, f"{path} is {shown!r}: {error}")
        return None
    except TypeError:
        hint = ""
        if type_name(kind).startswith("str") and isinstance(value, int | float):
            hint = f". Quote text that looks like a number: \"'{shown}'\" on the command line"
        if type_name(kind).startswith("bool"):
            hint = ". Write true or false"
        report(path, f"{path} is {shown!r} ({_given(value)}): expected {type_name(kind)}{hint}")
        return None


def _require_given(value: Any) -> None:
    """Raises: ValueError for the mask that replaces a secret in a saved configuration."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _require_given(item)
    elif isinstance(value, str) and is_masked(value):
        raise ValueError("this is the mask of a secret in saved configurations. Set the real value, or null if allowed")


def _given(value: Any) -> str:
    if value is None:
        return "null"
    return "list" if isinstance(value, list | tuple) else type(value).__name__


def _plain(kind: Any, value: Any) -> Any:
    """`value` as `kind`. An int is a float; one value is a list of one.

    Raises: TypeError for another type, ValueError (the end of a sentence) for a value that a rule forbids.
    """
    if _rule(kind) is not None:
        value = _plain(kind.__origin__, value)
        if (problem := _rule(kind).problem(value)) is not None:
            raise ValueError(problem)
        return value
    if _is_union(kind):
        if value is None:
            return None
        (inner,) = (part for part in typing.get_args(kind) if part is not type(None))
        return _plain(inner, value)
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        if parts[-1] is ...:
            values = value if isinstance(value, list | tuple) else [value]
            return tuple(_plain(parts[0], item) for item in values)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise TypeError
        return tuple(_plain(part, item) for part, item in zip(parts, value, strict=True))
    if is_free_form(kind):
        if not isinstance(value, Mapping):
            raise TypeError
        return dict(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value
