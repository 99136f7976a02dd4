"""The rules of table.yaml, by key."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.spelling import nearest

FILE = Path(__file__).with_name("table.yaml")
OWN_SECTIONS = ("env_kwargs", "max_env_workers")
"""Names here where 0.4 has that of an environment (`environment.skyrl_gym.NAME`)."""
UNTIL_DOT = "env"
"""Placeholder for one part of a key; any other stands for the rest of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Translation of some values of a key; table.yaml explains the fields."""

    values: tuple[Any, ...] | None = None
    """Values to which the case applies; None: all values."""
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    only: str | None = None
    to: Mapping[str, Any] = field(default_factory=dict)
    replaces: bool = False
    adds: str | None = None
    note: str = ""
    error: str | None = None

    def applies(self, value: Any, given: Mapping[str, Any], *, is_old: bool) -> bool:
        """Args: given: key -> value; is_old: whether keys that do not exist here are given."""
        return (
            (self.values is None or any(same(value, each) for each in self.values))
            and (self.only is None or is_old)
            and all(any(same(given.get(key), each) for each in values) for key, values in self.when.items())
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The cases of the keys that one entry names."""

    keys: tuple[str, ...]
    """Notation of the table, with braces."""
    cases: tuple[Case, ...]

    def hint(self, key: str, parts: Sequence[str]) -> str:
        """End of a sentence about a key that is not on a command line, where it would be translated."""
        new = {filled(name, parts) for case in self.cases for name in case.to} - {key}
        if new:
            return f"skyrl_train 0.4's name, read on command lines only. Here it is {' and '.join(sorted(new))}"
        if any(case.adds for case in self.cases):
            return "skyrl_train 0.4's name, read on command lines only. Here it is trainer.algorithm.corrections"
        error = next((case.error for case in self.cases if case.error), None)
        return error or "a key of skyrl_train 0.4 without effect here. Remove it"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Difference between a configuration here and the same one in 0.4."""

    text: str
    when: Mapping[str, tuple[Any, ...]]
    unless: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The contents of table.yaml."""

    sections: Mapping[str, tuple[Rule, ...]]
    """Title -> rules."""
    defaults: Mapping[str, Any]
    """Key -> another default in 0.4."""
    meanings: tuple[Meaning, ...]
    exact: Mapping[str, tuple[Rule, tuple[str, ...]]]
    """Key -> its rule and the parts for <1>, <2>."""
    patterns: tuple[tuple[re.Pattern[str], Rule], ...]

    def find(self, key: str, *, patterns: bool = True) -> tuple[Rule, tuple[str, ...]] | None:
        """The rule of a key with its parts. Args: patterns: also search rules with <...>."""
        if key in self.exact or not patterns:
            return self.exact.get(key)
        if any(nearest(part, OWN_SECTIONS) for part in key.split(".")[2:3]):
            return None  # a misspelt key of this project
        matches = ((pattern.fullmatch(key), rule) for pattern, rule in self.patterns)
        return next(((rule, match.groups()) for match, rule in matches if match is not None), None)

    def hint(self, key: str) -> str | None:
        found = self.find(key)
        return None if found is None else found[0].hint(key, found[1])


def same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def filled(text: str, parts: Sequence[str]) -> str:
    """`text` with <1>, <2> replaced by the parts of a key."""
    return re.sub(r"<(\d)>", lambda match: parts[int(match[1]) - 1], text)


def expanded(key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key of `a{b,c}d` with the parts that were chosen."""
    pieces = re.split(r"\{([^}]*)\}", key)
    for parts in itertools.product(*(piece.split(",") for piece in pieces[1::2])):
        yield "".join(itertools.chain(*itertools.zip_longest(pieces[::2], parts, fillvalue=""))), parts


def _case(entry: Mapping[str, Any]) -> Case:
    fields = dict(entry)
    if "is" in fields:
        fields["values"] = _several(fields.pop("is"))
    fields["when"] = _conditions(fields.pop("when", {}))
    return Case(**fields)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _conditions(entry: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {key: _several(values) for key, values in entry.items()}


def _rule(entry: Mapping[str, Any]) -> Rule:
    fields = dict(entry)
    keys = fields.pop("keys")
    cases = fields.pop("cases", [fields])
    return Rule(keys=_several(keys), cases=tuple(_case(case) for case in cases))


@functools.cache
def table() -> Table:
    """The table, read once."""
    plain = yaml.safe_load(FILE.read_text())
    sections = {part["title"]: tuple(_rule(entry) for entry in part["rules"]) for part in plain["rules"]}
    exact: dict[str, tuple[Rule, tuple[str, ...]]] = {}
    patterns: list[tuple[re.Pattern[str], Rule]] = []
    for rule in itertools.chain(*sections.values()):
        for key in rule.keys:
            if "<" in key:
                spelled = re.sub(r"<(\w+)>", lambda m: "([^.]+)" if m[1] == UNTIL_DOT else "(.+)", re.escape(key))
                patterns.append((re.compile(spelled), rule))
                continue
            exact |= {name: (rule, parts) for name, parts in expanded(key)}
    meanings = tuple(
        Meaning(
            text=entry["text"], when=_conditions(entry.get("when", {})), unless=_conditions(entry.get("unless", {}))
        )
        for entry in plain["meanings"]
    )
    return Table(
        sections=sections, defaults=plain["defaults"], meanings=meanings, exact=exact, patterns=tuple(patterns)
    )
