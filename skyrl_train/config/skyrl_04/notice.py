"""The warning about a translated command line, or with trainer.strict_config the error."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.skyrl_04.table import Meaning, same, table
from skyrl_train.config.skyrl_04.translate import STRICT, Translation, shown

log = logging.getLogger(__name__)


def report(
    translation: Translation, values: Mapping[str, Any], chosen: Collection[str], place: str = "on the command line"
) -> None:
    """Log what was translated. Args: values, chosen: of the composed configuration (compose.py); place: of the keys.

    Raises: ConfigError where trainer.strict_config refuses what was translated.
    """
    if not translation:
        return
    if value_at(values, STRICT) is True:
        raise ConfigError([*_refusals(translation)])
    log.warning("\n".join(notice(translation, values, chosen, place)))


def notice(translation: Translation, values: Mapping[str, Any], chosen: Collection[str], place: str) -> Iterator[str]:
    """The lines of the warning."""
    yield (
        f"keys and values of skyrl_train 0.4 {place} (docs/skyrl_train_04.md; trainer.strict_config=true refuses them)"
    )
    if translation.mapped:
        yield "  translated:"
    for old, new in translation.mapped.items():
        note = f" ({translation.notes[old]})" if old in translation.notes else ""
        yield f"    {old} -> {', '.join(new)}{note}"
    if translation.ignored:
        yield "  without effect here:"
    for note, old_keys in _by_note(translation.ignored).items():
        yield f"    {', '.join(old_keys)}{f': {note}' if note else ''}"
    if not translation.is_old:
        return
    defaults = [
        f"{shown(key, here)} (0.4: {shown(key, there).partition('=')[2]})"
        for key, there in table().defaults.items()
        if key not in chosen and not same(here := value_at(values, key), there) and _matters(key, values)
    ]
    if defaults:
        yield f"  other defaults: {', '.join(defaults)}"
    meanings = [meaning.text for meaning in table().meanings if _is_said(meaning, values)]
    if meanings:
        yield "  other meanings:"
    yield from (f"    {text}" for text in dict.fromkeys(meanings))


def _refusals(translation: Translation) -> Iterator[str]:
    for old, new in translation.mapped.items():
        yield f"{old} is of skyrl_train 0.4, and trainer.strict_config is true. Write {' '.join(new)}"
    for old in translation.ignored:
        yield f"{old} is of skyrl_train 0.4 and has no effect here, and trainer.strict_config is true. Remove it"


def _by_note(ignored: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for old, note in ignored.items():
        found.setdefault(note, []).append(old)
    return found


def _matters(key: str, values: Mapping[str, Any]) -> bool:
    """Whether the chosen algorithm reads a key of `algorithm.NAME`."""
    section = key.removeprefix("trainer.algorithm.").partition(".")[0]
    return section == key.partition(".")[0] or value_at(values, "trainer.algorithm.policy_loss_type") == section


def _is_said(meaning: Meaning, values: Mapping[str, Any]) -> bool:
    def holds(key: str, allowed: tuple[Any, ...]) -> bool:
        return any(same(value_at(values, key), each) for each in allowed)

    return all(holds(*each) for each in meaning.when.items()) and not any(
        holds(*each) for each in meaning.unless.items()
    )


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
