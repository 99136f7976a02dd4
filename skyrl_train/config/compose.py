"""Composition with Hydra: base + `+experiment=NAME` + overrides -> one plain dictionary.

Overrides and files are compared with the schema first, so that the error for a misspelt key names the key and its
origin; Hydra's own message is about struct mode, and a misspelt key in an experiment file gives none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.files import (
    ConfigFile,
    check_files,
    chosen_files,
    dotted_keys,
    experiments,
    leave_out_foreign,
    shown_path,
)
from skyrl_train.config.overrides import hydra_line, is_searchpath, literal, parse, problem, selected_twice, strings
from skyrl_train.config.skyrl_04.notice import value_at
from skyrl_train.config.skyrl_04.translate import Translation, translate
from skyrl_train.spelling import nearest

OmegaConf.register_new_resolver("dtype_name", lambda bf16: "bfloat16" if bf16 else "float32", replace=True)
DEFAULT_ENV_CLASS = "gsm8k"
RELATIVE_TO_ENGINE = ("dppo", "rollout_is")
"""Losses whose ratio is to the engine's policy."""


def _corrections(source: str, max_staleness: int | None, loss: str, quantization: str | None) -> list[str]:
    """Truncated importance sampling where the samples are of older or quantised weights and the loss does not account
    for it.
    """
    # Anything but an integer is an error of the schema.
    is_stale = max_staleness > 0 if isinstance(max_staleness, int) else source == "streaming"
    return ["token_tis"] if (is_stale or quantization) and loss not in RELATIVE_TO_ENGINE else []


def _env_class(reward_fn: str | None) -> str:
    return "reward_fn" if reward_fn else DEFAULT_ENV_CLASS


OmegaConf.register_new_resolver("env_class", _env_class, replace=True)
OmegaConf.register_new_resolver("corrections", _corrections, replace=True)


@dataclass(frozen=True)
class Composed:
    """The result of a composition."""

    values: dict[str, Any]
    """Untyped, interpolations resolved."""
    where: Callable[[str], str]
    """Origin of a dotted key: ` (in FILE)`, ` (on the command line)` or ""."""
    chosen: frozenset[str] = frozenset()
    """Keys, or sections, that experiments and overrides set."""
    translation: Translation = Translation()  # noqa: RUF009
    """Translation of the keys of skyrl_train 0.4 on the command line."""


def compose(
    schema: type, base: Path, overrides: Sequence[str], folders: Sequence[Path] = (), derived: Mapping[str, str] = {}
) -> Composed:
    """Values of `base`, the chosen experiments and the overrides.

    Args: derived: key -> expression that replaces its value in `base`, unless an experiment sets it.
    Raises: ConfigError with all misspelt overrides, or with the first error of Hydra.
    """
    base = base.resolve()
    extra = list(dict.fromkeys(f.resolve() for f in folders if f.resolve() != base.parent))
    given = [parse(text, schema) for text in overrides]
    parsed, translation = translate(given, schema)
    chosen = _experiment_files(schema, base, given, extra) if derived or translation or translation.problems else []
    if translation or translation.problems:
        parsed, translation = translate(given, schema, values=values_of(schema, chosen))
    problems = [p for override in parsed if (p := problem(override, schema, [base.parent, *extra])) is not None]
    problems += [*translation.problems, *selected_twice(parsed)]
    if problems:
        raise ConfigError(problems)
    by_experiments = {key for file in chosen for key in dotted_keys(schema, file.values)}
    lines = [f"{key}={literal(derived[key])}" for key in derived if key not in by_experiments]
    lines += [hydra_line(override, schema) for override in parsed if not is_searchpath(override)]
    lines.append(_search_path(parsed, extra))
    try:
        config, files = _composed(base, lines)
    except MissingConfigException as error:
        raise ConfigError(_missing(error, [base.parent, *extra])) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"invalid YAML: {error}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from None
    return _finished(schema, config, parsed, files, translation)


def _composed(base: Path, lines: Sequence[str]) -> tuple[DictConfig, list[ConfigFile]]:
    with initialize_config_dir(str(base.parent), version_base=None):
        config = hydra_compose(base.stem, [*lines], return_hydra_config=True)
        return config, chosen_files(config.hydra, base.stem, lines)


def _search_path(overrides: Sequence[Override], folders: Sequence[Path]) -> str:
    paths = [path for override in overrides if is_searchpath(override) for path in strings(override)]
    return f"hydra.searchpath={literal([*paths, *(f'file://{folder}' for folder in folders)])}"


def _experiment_files(
    schema: type, base: Path, overrides: Sequence[Override], folders: Sequence[Path]
) -> list[ConfigFile]:
    """The chosen experiments, on which the translation of a command line may depend."""
    lines = [hydra_line(override, schema) for override in overrides if override.key_or_group == "experiment"]
    try:
        files = _composed(base, [*lines, _search_path(overrides, folders)])[1]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ConfigError):  # said when all is composed
        return []
    return [file for file in files if file.is_experiment]


def values_of(schema: type, files: Sequence[ConfigFile]) -> dict[str, Any]:
    """Dotted keys in the files with their values, without those that refer to others."""
    chosen = [(key, file) for file in files for key in dotted_keys(schema, file.values)]
    return {key: value for key, file in chosen if "${" not in str(value := value_at(file.values, key))}


def base_yaml(schema: type, base: Path) -> str:
    """`base` laid over the base that it builds on, without keys that `schema` does not have."""
    whole = cast(DictConfig, OmegaConf.load(base))
    builds_on = [name for name in whole.pop("defaults", []) if name != "_self_"]
    for name in reversed(builds_on):
        whole = cast(DictConfig, OmegaConf.merge(OmegaConf.load(base.with_name(f"{name}.yaml")), whole))
    files = [ConfigFile(base.name, "", cast(dict[str, Any], OmegaConf.to_container(whole)), is_lower_base=True)]
    leave_out_foreign(whole, schema, files)
    return OmegaConf.to_yaml(whole)


def derived_keys(schema: type, base: Path, file: Path) -> dict[str, str]:
    """Key -> its expression with `${...}` in `base`, for each key whose value in a complete file is what the expression
    gives there. Composed with it, the key follows overrides. Raises: ConfigError for a file that is not a mapping.
    """
    whole, given = cast(DictConfig, OmegaConf.create(base_yaml(schema, base))), _complete(file)
    found: dict[str, str] = {}
    for key, expression in _expressions(whole):
        trial = copy.deepcopy(given)
        try:
            value = OmegaConf.select(trial, key, default=...)
            OmegaConf.update(trial, key, expression)
            if value is not ... and OmegaConf.select(trial, key) == value:
                found[key] = expression
        except OmegaConfBaseException:  # a file without a key that the expression names
            continue
    return found


def _complete(file: Path) -> DictConfig:
    try:
        given = OmegaConf.load(file)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file is {file}: it cannot be read ({error})") from None
    if not isinstance(given, DictConfig) or not given:
        raise ConfigError(f"--config-file is {file}: not a configuration. Name one such as the config.yaml of a run")
    return given


def _expressions(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each key with an interpolation, and its expression."""
    for name, value in cast(dict[str, Any], OmegaConf.to_container(config, resolve=False)).items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _expressions(OmegaConf.create(value), f"{key}.")
        elif isinstance(value, str) and "${" in value:
            yield key, value


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain dictionaries with every `${...}` resolved. Raises: ConfigError."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key} cannot be resolved: {reason}") from None
    return cast(dict[str, Any], plain)


def _finished(
    schema: type,
    config: DictConfig,
    overrides: Sequence[Override],
    files: Sequence[ConfigFile],
    translation: Translation,
) -> Composed:
    check_files(schema, files)
    OmegaConf.set_struct(config, False)
    config.pop("hydra", None)
    leave_out_foreign(config, schema, files)
    chosen = {key for file in files if file.is_experiment for key in dotted_keys(schema, file.values)}
    return Composed(
        resolved(config),
        _origins(schema, overrides, files, translation.sources),
        frozenset(chosen | {override.key_or_group for override in overrides}),
        translation,
    )


def _origins(
    schema: type, overrides: Sequence[Override], files: Sequence[ConfigFile], sources: Mapping[str, str]
) -> Callable[[str], str]:
    """Args: sources: key -> the `key=value` of skyrl_train 0.4 that it was translated from."""
    set_by_hand = {override.key_or_group for override in overrides}
    set_by_file = [(file.shown, set(dotted_keys(schema, file.values))) for file in files]

    def where(path: str) -> str:
        if path in sources:
            return f" (from {sources[path]} on the command line)"
        if any(f"{path}.".startswith(f"{key}.") for key in set_by_hand):
            return " (on the command line)"
        for shown, paths in reversed(set_by_file):
            if path in paths:
                return f" (in {shown})"
        return ""

    return where


def _missing(error: MissingConfigException, folders: Sequence[Path]) -> str:
    """The error for a missing file; for an experiment, with the available ones."""
    missing = error.missing_cfg_file or str(error)
    group, _, name = missing.partition("/")
    if group != "experiment":
        return f"{missing}.yaml was not found in {', '.join(shown_path(folder) for folder in folders)}"
    names = experiments(folders)
    close = nearest(name, names)
    meant = f": did you mean {close}?" if close else "."
    return (
        f"experiment {name!r} does not exist{meant} Available: {', '.join(names)}. Use --config-dir to add a folder "
        "with your own"
    )
