"""Configurations of programs with `@hydra.main`, as skyrl_train 0.4's users write them.

Hydra reads the command line before the program runs, and rejects keys of 0.4. So importing 0.4's entry translates the
arguments of the process; `validate_cfg` reports the translation. Keys that only the user's code knows (`+key=value`)
stay in the `DictConfig`, and are in `extra` of the typed configuration.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from skyrl_train.algorithms.build import takes_all
from skyrl_train.algorithms.tables import ADVANTAGES, LOSSES, import_modules
from skyrl_train.checks.rl import check
from skyrl_train.compat.registries import registering_modules
from skyrl_train.config import Config, ConfigError
from skyrl_train.config.compose import resolved, values_of
from skyrl_train.config.files import chosen_files, is_shipped
from skyrl_train.config.overrides import escaped, hydra_line, literal, parse
from skyrl_train.config.rl import RL
from skyrl_train.config.schema import field_types, is_free_form, key_types
from skyrl_train.config.skyrl_04.notice import report
from skyrl_train.config.skyrl_04.table import table
from skyrl_train.config.skyrl_04.translate import Translation, translate

ALGORITHM = "trainer.algorithm."
MAX_SEQ_LEN = f"{ALGORITHM}max_seq_len"
IN_PROGRAM = "in the program's configuration"
IF_SET = ("trainer.algorithm.corrections", "trainer.algorithm.off_policy_correction.")
"""Keys for which table.yaml asks whether they were set."""
_pending: list[tuple[list[str], Translation]] = []
"""Arguments of this process with keys of 0.4, and their translation, until it has been reported."""
_reported: list[Translation] = []
"""Translations of keys in the program's configuration."""


def translate_arguments() -> None:
    """Replace keys of 0.4 in `sys.argv` by those that exist here, and add the + that Hydra wants before new keys of
    free-form mappings (data.columns).
    """
    arguments, translation = translated(sys.argv[1:])
    if translation or translation.problems:
        _pending.append((sys.argv[1:], translation))
    sys.argv[1:] = arguments


def translated(arguments: Sequence[str], values: Mapping[str, Any] = {}) -> tuple[list[str], Translation]:
    """Arguments for Hydra; flags, groups and keys that only the program reads are kept, in front.

    Args: values: those of other keys, on which translations may depend.
    """
    sections = field_types(Config)
    own = [text for text in arguments if _is_of_an_example(text)]
    others = [text for text in arguments if text not in own]
    ours = [text for text in others if text.lstrip("+").split("=")[0].partition(".")[0] in sections and "=" in text]
    try:
        overrides, translation = translate([parse(text, Config) for text in ours], Config, values=values)
    except ConfigError:  # Hydra says what cannot be read
        return list(arguments), Translation()
    kept = [*(text for text in others if text not in ours), *(f"++{text.lstrip('+')}" for text in own)]
    kept.sort(key=_is_override)  # flags first: the parser of Hydra takes overrides in one piece
    return [*kept, *(hydra_line(override, Config) for override in overrides)], translation


def _is_override(text: str) -> bool:
    """Whether an argument is not a flag of Hydra or its value."""
    return text.startswith("~") or ("=" in text and not text.startswith("-"))


def _is_of_an_example(text: str) -> bool:
    """Whether 0.4's examples read the key, which is in `extra` here: it stays at its path in `cfg` too."""
    found = table().find(text.lstrip("+").partition("=")[0])
    return found is not None and any(name.startswith("extra.") for case in found[0].cases for name in case.to)


def validate_cfg(cfg: DictConfig) -> None:
    """Check a configuration before anything starts. Like in 0.4 it gets `trainer.algorithm.max_seq_len`, and
    `trainer.custom_modules` also names the modules whose losses and estimators are registered.

    Raises: ConfigError, a ValueError.
    """
    named = cfg.trainer.custom_modules
    modules = [*([named] if isinstance(named, str) else named or ()), *registering_modules()]
    with open_dict(cfg):
        cfg.trainer.custom_modules = list(dict.fromkeys(modules))
        lengths = cfg.generator.max_input_length, cfg.generator.sampling_params.max_generate_length
        OmegaConf.update(cfg, MAX_SEQ_LEN, sum(lengths))
    arguments, translation = _pending.pop() if _pending else ([], Translation())
    given = {text.lstrip("+").partition("=")[0] for text in sys.argv[1:] if "=" in text}
    if arguments and HydraConfig.initialized() and HydraConfig.get().mode is not RunMode.MULTIRUN:
        translation, of_files = _in_view_of_files(cfg, arguments)
        given |= of_files | translation.sources.keys()
    if translation.problems:
        raise ConfigError(translation.problems)
    config, inside = _typed(cfg)
    report(translation, resolved(cfg), given)
    if inside not in _reported:  # initialize_ray calls this again
        _reported.append(inside)
        report(inside, resolved(cfg), given, IN_PROGRAM)
    try:
        check(config, None, files=False)
    except ConfigError as error:
        raise translation.naming_old_keys(error) from error


def _in_view_of_files(cfg: DictConfig, arguments: Sequence[str]) -> tuple[Translation, set[str]]:
    """Translate arguments again in view of the program's YAML, which is not known when it imports 0.4's entry, and
    change the keys of cfg that get other values. Not for jobs of a sweep, whose values are not those of the arguments.
    Returns: the translation, and the keys that the YAML sets.
    """
    hydra = cast(DictConfig, HydraConfig.get())
    first = list(hydra.overrides.task)
    files = [file for file in chosen_files(hydra, hydra.job.config_name, first) if not is_shipped(file)]
    values = values_of(Config, files)
    lines, translation = translated(arguments, values)
    lines = [line for line in lines if _is_override(line) and not line.lstrip("+~").startswith("hydra.")]
    if not translation.problems and lines != first:
        composed = compose(hydra.job.config_name, lines)
        changed = {line.lstrip("+").partition("=")[0] for line in {*lines} ^ {*first}}
        for key in changed & set(key_types(Config)):
            OmegaConf.update(cfg, key, OmegaConf.select(composed, key), force_add=True)
    return translation, set(values)


def config_of(cfg: DictConfig) -> Config:
    """The typed configuration. Keys of 0.4 that the program added are translated. Raises: ConfigError."""
    return _typed(cfg)[0]


def _typed(cfg: DictConfig) -> tuple[Config, Translation]:
    """`config_of`, and the translation of what is not from the command line."""
    plain, kinds = resolved(cfg), key_types(Config)
    leaves = dict(_leaves(plain, kinds))
    foreign = {key: value for key, value in leaves.items() if key not in kinds}
    old = {key: value for key, value in foreign.items() if key.partition(".")[0] in kinds and table().find(key)}
    given = _given(cfg, plain)
    of_values = {key: value for key, value in given.items() if table().find(key, patterns=False) is not None}
    known = {key: value for key, value in leaves.items() if key in kinds and not key.startswith(IF_SET)}
    overrides = [parse(f"++{key}={literal(escaped(value))}") for key, value in (old | of_values).items()]
    overrides, translation = translate(overrides, Config, given, known, IN_PROGRAM)
    if translation.problems:
        raise ConfigError(translation.problems)
    translated = copy.deepcopy(cfg)
    for override in overrides:  # before keys that refer to these are resolved
        OmegaConf.update(translated, override.key_or_group, override.value(), force_add=True)
    plain = resolved(translated)
    reads_all = _reads_all(plain["trainer"]["custom_modules"], plain["trainer"]["algorithm"])
    values: dict[str, Any] = {}
    for key, value in _leaves(plain, kinds):
        if key in kinds:
            _place(values, key, value)
        elif key in old:
            continue
        elif key.startswith(ALGORITHM) and reads_all:
            _place(values, f"{ALGORITHM}parameters.{key.removeprefix(ALGORITHM)}", value)
        elif key != MAX_SEQ_LEN:
            _place(values, f"extra.{key}", value)
    return RL.built(values), translation


def _given(cfg: DictConfig, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of this project whose values are neither those of its base nor follow from others, also as a whole section.
    Args: plain: resolved.
    """
    kinds = key_types(Config)
    base = dict(_leaves(yaml.safe_load(RL.base_yaml()), kinds))
    written = dict(_leaves(cast(dict[str, Any], OmegaConf.to_container(cfg)), kinds))
    return {
        key: value
        for key, value in _leaves(plain, kinds)
        if key in kinds and "${" not in str(written.get(key, "${")) and value != base.get(key, ...)
    }


def _reads_all(modules: Sequence[str], algorithm: Mapping[str, Any]) -> bool:
    """Whether the loss or the estimator gets all values of trainer.algorithm."""
    try:
        import_modules(modules)
        loss = LOSSES.resolve(algorithm["policy_loss_type"])
        estimator = ADVANTAGES.resolve(algorithm["advantage_estimator"])
    except ValueError:  # an error of the configuration too, with the key's origin
        return False
    return takes_all(loss) or takes_all(estimator)


def _place(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    for part in section.split(".") if section else ():
        values = values.setdefault(part, {})
    values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value


def _leaves(values: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; free-form mappings of the schema are not divided."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not is_free_form(kinds.get(key)):
            yield from _leaves(value, kinds, f"{key}.")
        else:
            yield key, value
