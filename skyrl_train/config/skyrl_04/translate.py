"""Overrides with keys and values of skyrl_train 0.4 -> overrides with those that exist here.

The order of the command line stays, and the last of several overrides of one key wins, as in Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.overrides import is_known, literal, parse
from skyrl_train.config.redaction import BY_NAME
from skyrl_train.config.schema import key_types
from skyrl_train.config.skyrl_04.conversions import CONVERSIONS
from skyrl_train.config.skyrl_04.table import Case, filled, same, table

CORRECTIONS = "trainer.algorithm.corrections"
STRICT = "trainer.strict_config"


@dataclass(frozen=True, slots=True)
class Item:
    """One key on the command line."""

    key: str
    value: Any
    override: Override
    """The override as given, or one entry of a mapping in it."""

    @property
    def text(self) -> str:
        return shown(self.key, self.value)


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Translation of the keys of 0.4 on a command line; secrets are masked."""

    is_old: bool = False
    """Whether it has keys that do not exist here."""
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`key=value` there -> `key=value` here."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """`key=value` there -> what it means here, or ""."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """`key=value` there -> what its translation means."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key here -> the `key=value` there that set it."""
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.mapped or self.ignored)

    def naming_old_keys(self, error: ConfigError) -> ConfigError:
        """The error with the keys of 0.4 behind each problem that names what they became, or its section."""
        return ConfigError([self._named(problem) for problem in error.problems])

    def _named(self, problem: str) -> str:
        words = {word.strip("`'\".,:;()=").removesuffix("'s") for word in problem.replace("=", " ").split()}
        said = [
            f"{old} is {key} here"
            for key, old in self.sources.items()
            if (key in words or key.rpartition(".")[0] in words) and f"{key}=" not in old and old not in problem
        ]
        return f"{problem} ({'; '.join(said)})" if said else problem


def shown(key: str, value: Any) -> str:
    """`key=value` for messages, secrets masked."""
    text = value if isinstance(value, str) and value else literal(value)
    return BY_NAME.argument(f"{key}={text}")


def translate(
    overrides: Sequence[Override],
    schema: type,
    given: Mapping[str, Any] = {},
    values: Mapping[str, Any] = {},
    place: str = "on the command line",
) -> tuple[list[Override], Translation]:
    """The overrides without keys of 0.4, and what became of those. Its problems are for the user, and no error yet.

    Programs without trainer.strict_config (0.4 had no fine-tuning) translate nothing.
    Args: given: keys that were set elsewhere, which no translation may change; values: of other keys, on which
        translations may depend; place: of the overrides, for errors.
    """
    if STRICT not in key_types(schema):
        return list(overrides), Translation()
    items = [item for override in overrides for item in _items(override, schema)]
    given = {**given, **{item.key: item.value for item in items}}
    known, kinds = {**values, **given}, key_types(schema)
    is_old = any(not is_known(item.key, kinds) and table().find(item.key) is not None for item in items)
    work = _Work(given=given, known=known, is_old=is_old, place=place)
    last = {item.key: number for number, item in enumerate(items)}
    for number, item in enumerate(items):
        found = table().find(item.key, patterns=not is_known(item.key, kinds))
        if found is None or item.override.is_delete() or item.override.is_sweep_override():
            work.kept.append(item)
        elif last[item.key] == number:
            rule, parts = found
            cases = [case for case in rule.cases if case.applies(item.value, known, is_old=is_old)]
            work.apply(item, cases[0] if cases else None, parts)
    return work.finished()


def _items(override: Override, schema: type) -> Iterator[Item]:
    """The override, or one for each entry of a mapping in which an entry has a rule."""
    kinds = key_types(schema)
    whole = Item(override.key_or_group, override.value(), override)
    entries = list(_entries(whole.key, whole.value))
    if not override.is_sweep_override() and any(
        table().find(key, patterns=not is_known(key, kinds)) is not None for key, _ in entries
    ):
        for key, value in entries:
            yield whole if key == whole.key else Item(key, value, parse(f"++{key}={literal(value)}"))
    else:
        yield whole


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and key not in table().exact:
        for name, inner in value.items():
            yield from _entries(f"{key}.{name}", inner)
    else:
        yield key, value


@dataclass
class _Work:
    given: Mapping[str, Any]
    known: Mapping[str, Any]
    """Also values that were not set."""
    is_old: bool
    place: str
    kept: list[Item | Override] = field(default_factory=list)
    """In the order of the command line; an Override is a translated one."""
    mapped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Key here -> translated value."""
    added: dict[str, list[str]] = field(default_factory=dict)
    """Correction -> `key=value` of 0.4 that ask for it."""
    replaced: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def apply(self, item: Item, case: Case | None, parts: Sequence[str]) -> None:
        """Add what `item` becomes; without a case it is kept."""
        if case is None:
            self.kept.append(item)
        elif case.error is not None:
            self.problems.append(f"{item.text}: {case.error} ({self.place})")
        elif not case.to and case.adds is None:
            self.ignored[item.text] = case.note
        else:
            self._map(item, case, parts)

    def _map(self, item: Item, case: Case, parts: Sequence[str]) -> None:
        new = {filled(key, parts): self._converted(value, item.value) for key, value in case.to.items()}
        if case.adds is None and list(new) == [item.key] and same(new[item.key], item.value):
            self.kept.append(item)
            return
        for key, value in new.items():
            self._set(item, key, value, replaces=case.replaces)
        said = [shown(key, value) for key, value in new.items()]
        if case.adds is not None:
            self.added.setdefault(case.adds, []).append(item.text)
            said.append(f"{CORRECTIONS}=[{case.adds}]")
        self.mapped[item.text] = tuple(said)
        if case.note:
            self.notes[item.text] = case.note

    def _converted(self, value: Any, old: Any) -> Any:
        return CONVERSIONS[value](old, self.known) if isinstance(value, str) and value in CONVERSIONS else value

    def _set(self, item: Item, key: str, value: Any, *, replaces: bool) -> None:
        if replaces:
            self.replaced.add(key)
        elif key != item.key and key in self.given and not same(self.given[key], value):
            self._conflict(item.text, shown(key, value), shown(key, self.given[key]))
        elif key in self.values and not same(self.values[key], value):
            self._conflict(item.text, shown(key, value), self.sources[key])
        self.sources[key] = item.text
        self.values[key] = value
        self.kept.append(parse(f"++{key}={literal(value)}"))

    def _conflict(self, old: str, new: str, other: str) -> None:
        self.problems.append(f"{old} is {new} here, but {other} is given too. Remove one of them ({self.place})")

    def finished(self) -> tuple[list[Override], Translation]:
        """Corrections are one list, whichever keys ask for them."""
        if self.added:
            names = list(self.added)
            old = ", ".join(text for texts in self.added.values() for text in texts)
            if CORRECTIONS in self.given and set(names) != set(_listed(self.given[CORRECTIONS])):
                self._conflict(old, shown(CORRECTIONS, names), shown(CORRECTIONS, self.given[CORRECTIONS]))
            self.sources[CORRECTIONS] = old
            self.kept.append(parse(f"++{CORRECTIONS}={literal(names)}"))
        lines = [
            each.override if isinstance(each, Item) else each
            for each in self.kept
            if not (isinstance(each, Item) and each.key in self.replaced)
        ]
        translation = Translation(
            is_old=self.is_old,
            mapped=self.mapped,
            ignored=self.ignored,
            notes=self.notes,
            sources=self.sources,
            problems=tuple(self.problems),
        )
        return lines, translation


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
