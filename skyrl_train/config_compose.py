"""Hydra's side of the configuration: base + `+experiment=NAME` + overrides -> one plain dictionary.

Every override and every file is compared with the schema here, so that a misspelt key is one sentence that names the
place it was written, instead of Hydra's message about struct mode (or, in an experiment file, no message at all).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.config_errors import ConfigError, nearest
from skyrl_train.config_schema import field_types, is_free_form, key_types, unknown_key

OmegaConf.register_new_resolver("dtype_name", lambda bf16: "bfloat16" if bf16 else "float32", replace=True)


@dataclass(frozen=True)
class Composed:
    """A configuration before it is typed."""

    values: dict[str, Any]
    where: Callable[[str], str]
    """Dotted key -> ` (in FILE)`, ` (on the command line)` or ""."""


@dataclass(frozen=True)
class ConfigFile:
    """One YAML file of a composition."""

    shown: str
    """Its path as a person would type it here."""
    package: str
    """Where Hydra puts its keys, "" for the top level."""
    values: dict[str, Any]
    """From the top level down, interpolations as written."""
    is_lower_base: bool
    """The base of another program, on which this one's builds: it may have keys that this program does not."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    base: Path
    """File with every key."""
    overrides: tuple[str, ...]
    folders: tuple[Path, ...]
    """Searched for experiments."""
    print_config: bool


def shipped_folder() -> Path:
    """`configs/` inside the installed package, or beside the package in a source checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {self.usage}")


def read_command_line(argv: Sequence[str], base: Path, module: str, purpose: str) -> Request:
    """Flags and overrides apart. The current folder's `configs/` is searched for experiments as well."""
    parser = _Parser(
        usage=f"python -m {module} [+experiment=NAME] [key=value ...]",
        description=purpose,
        epilog=f"Every key with its value and meaning: {base}. Experiments: {', '.join(_experiments([base.parent]))}.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with an experiment/ folder of your own")
    parser.add_argument("--config-file", help="start from this complete file, such as the config.yaml of a run")
    parser.add_argument("--cfg", "-c", choices=["job"], help="print the configuration instead of training")
    flags = parser.parse_intermixed_args(list(argv))
    folders = [Path("configs")] if Path("configs/experiment").is_dir() else []
    if flags.config_dir is not None:
        folders.append(Path(flags.config_dir))
        if not folders[-1].is_dir():
            raise ConfigError(f"--config-dir {flags.config_dir}: there is no such folder")
    if flags.config_file is not None:
        folders.append(base.parent)
        base = Path(flags.config_file)
        if not base.is_file() or base.suffix != ".yaml":
            raise ConfigError(f"--config-file {base}: there is no such .yaml file")
    return Request(base, tuple(flags.overrides), tuple(folders), flags.cfg == "job")


def compose(schema: type, base: Path, overrides: Sequence[str], folders: Sequence[Path] = ()) -> Composed:
    """The values of `base`, the chosen experiments and the overrides, interpolations resolved.

    Raises: ConfigError with all misspelt overrides, or with the first thing that Hydra cannot read or find.
    """
    base = base.resolve()
    extra = list(dict.fromkeys(f.resolve() for f in folders if f.resolve() != base.parent))
    parsed = [_parse(text) for text in overrides]
    problems = [p for override in parsed if (p := _problem(override, schema, [base.parent, *extra])) is not None]
    if problems:
        raise ConfigError(problems)
    lines = [_hydra_line(override, schema) for override in parsed if not _is_searchpath(override)]
    paths = [path for override in parsed if _is_searchpath(override) for path in _strings(override)]
    lines.append(f"hydra.searchpath={_quoted_list([*paths, *(f'file://{folder}' for folder in extra)])}")
    with initialize_config_dir(str(base.parent), version_base=None):
        try:
            config = hydra_compose(base.stem, lines, return_hydra_config=True)
            files = _chosen_files(config.hydra, base.stem, lines)
        except MissingConfigException as error:
            raise ConfigError(_missing(error, [base.parent, *extra])) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"not valid YAML: {error}") from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error)) from None
    _check_files(schema, files)
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    _leave_out_foreign(config, schema, files)
    return Composed(resolved(config), _origins(schema, parsed, files))


def base_yaml(schema: type, base: Path) -> str:
    """`base` laid over the base that it builds on, the keys that `schema` does not have left out."""
    whole = cast(DictConfig, OmegaConf.load(base))
    builds_on = [name for name in whole.pop("defaults", []) if name != "_self_"]
    for name in reversed(builds_on):
        whole = cast(DictConfig, OmegaConf.merge(OmegaConf.load(base.with_name(f"{name}.yaml")), whole))
    files = [ConfigFile(base.name, "", cast(dict[str, Any], OmegaConf.to_container(whole)), is_lower_base=True)]
    _leave_out_foreign(whole, schema, files)
    return OmegaConf.to_yaml(whole)


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain dictionaries with every `${...}` replaced; ConfigError where one cannot be."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key} cannot be worked out: {reason}") from None
    return cast(dict[str, Any], plain)


def of_hydra(schema: type, config: DictConfig) -> tuple[dict[str, Any], Callable[[str], str]]:
    """Values and `Composed.where` of what a running `@hydra.main` composed."""
    if not HydraConfig.initialized():
        return resolved(config), lambda path: ""
    hydra = HydraConfig.get()
    lines = list(hydra.overrides.task)
    files = _chosen_files(cast(DictConfig, hydra), hydra.job.config_name, [*hydra.overrides.hydra, *lines])
    _check_files(schema, files)
    config = config.copy()
    OmegaConf.set_struct(config, False)
    _leave_out_foreign(config, schema, files)
    return resolved(config), _origins(schema, [_parse(line) for line in lines], files)


# ---- overrides


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot read {text!r} on the command line, expected key=value: {reason}") from None


def _is_searchpath(override: Override) -> bool:
    return override.key_or_group == "hydra.searchpath"


def _strings(override: Override) -> list[str]:
    value = override.value()
    if not isinstance(value, list):
        raise ConfigError(f"hydra.searchpath is {value!r}, expected a list such as [file:///folder]")
    return [str(item) for item in value]


def _quoted_list(items: Sequence[str]) -> str:
    return "[" + ",".join("'" + item.replace("'", "\\'") + "'" for item in items) + "]"


def _below_free_form(path: str, kinds: dict[str, Any]) -> bool:
    parts = path.split(".")
    return any(is_free_form(kinds.get(".".join(parts[:n]))) for n in range(1, len(parts)))


def _problem(override: Override, schema: type, folders: Sequence[Path]) -> str | None:
    """What is wrong with one override, as a sentence, or None."""
    key, text = override.key_or_group, str(override.input_line)
    kinds = key_types(schema)
    if override.is_sweep_override():
        return f"{text}: sweeps are not supported, start one run per value"
    if _is_searchpath(override) or _below_free_form(key, kinds):
        return None
    if key == "hydra" or key.startswith("hydra."):
        return f"{text}: of Hydra's own settings only hydra.searchpath has a meaning here; runs go to trainer.run_dir"
    is_group = "." not in key and key not in kinds and any((folder / key).is_dir() for folder in folders)
    if is_group and not (override.is_add() and not override.is_force_add()) and not override.is_delete():
        return f"{text}: write +{text.lstrip('+')}"
    if is_group:
        return None
    if key not in kinds:
        return unknown_key(key, schema) + " (on the command line)"
    if override.is_delete():
        return f"{text}: a key cannot be taken away, set it instead"
    if not dataclasses.is_dataclass(kinds[key]):
        return None
    value = override.value()
    if not isinstance(value, dict):
        return f"{text}: {key} is a section, set one of its keys: {', '.join(field_types(kinds[key]))}"
    unknown = [path for path in _paths(schema, value, f"{key}.") if path not in kinds]
    return unknown_key(unknown[0], schema) + " (on the command line)" if unknown else None


def _hydra_line(override: Override, schema: type) -> str:
    """Known keys are set with or without `+`; keys of a free-form mapping are set whether they exist or not."""
    line, kinds = str(override.input_line), key_types(schema)
    if override.is_delete():
        return line
    if _below_free_form(override.key_or_group, kinds) or is_free_form(kinds.get(override.key_or_group)):
        return "++" + line.lstrip("+")
    return line.lstrip("+") if override.key_or_group in kinds else line


# ---- files


def _chosen_files(hydra: DictConfig, base: str | None, lines: Sequence[str]) -> list[ConfigFile]:
    """Every file that the composition read, in order, Hydra's own left out; `hydra` is the node of that name.

    Raises: ConfigError where a name stands for two files.
    """
    folders = [folder for source in hydra.runtime.config_sources if (folder := _folder(source)) is not None]
    loader = GlobalHydra.instance().config_loader()
    found = []
    for default in loader.compute_defaults_list(base, list(lines), RunMode.RUN).defaults:
        name = default.config_path
        if name is None or name.startswith("hydra/"):
            continue
        matches = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
        shown = [_shown(file) for file in matches]
        if len(matches) > 1 and name != base:
            raise ConfigError(f"{name} stands for two files, rename yours: {', '.join(shown)}")
        if matches:
            package = default.package or ""
            lower = name != base and "/" not in name
            found.append(ConfigFile(shown[0], package, _contents(matches[0], package), is_lower_base=lower))
    return found


def _folder(source: DictConfig) -> Path | None:
    """The folder of one entry of the search path; None for Hydra's own and for what is no folder."""
    if source.schema == "file":
        return Path(source.path)
    if source.schema == "pkg" and not source.path.startswith("hydra"):
        return Path(str(importlib.resources.files(source.path)))
    return None


def _contents(file: Path, package: str) -> dict[str, Any]:
    """What a file says, placed as it lies in the whole configuration."""
    loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    values: dict[str, Any] = {name: item for name, item in cast(dict[str, Any], loaded).items() if name != "defaults"}
    for name in reversed(package.split(".")) if package else ():
        values = {name: values}
    return values


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def _paths(schema: type, values: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in a file, down to what the schema does not know or does not look into."""
    kinds = key_types(schema)
    for name in values if isinstance(values, dict) else ():
        path = f"{prefix}{name}"
        yield path
        if dataclasses.is_dataclass(kinds.get(path)):
            yield from _paths(schema, values[name], f"{path}.")


def _check_files(schema: type, files: Sequence[ConfigFile]) -> None:
    problems = []
    for file in files:
        if file.package == "experiment":
            problems.append(f"{file.shown}: the first line must be `# @package _global_`")
            continue
        if not file.is_lower_base:
            problems += [f"{unknown_key(path, schema)} (in {file.shown})" for path in _foreign(file, schema)]
    if problems:
        raise ConfigError(problems)


def _foreign(file: ConfigFile, schema: type) -> list[str]:
    """Its keys that the schema does not have."""
    kinds = key_types(schema)
    return [path for path in _paths(schema, file.values) if path not in kinds]


def _leave_out_foreign(config: DictConfig, schema: type, files: Sequence[ConfigFile]) -> None:
    """Take away what only another program reads."""
    for path in [path for file in files if file.is_lower_base for path in _foreign(file, schema)]:
        section, _, name = path.rpartition(".")
        node = OmegaConf.select(config, section) if section else config
        node.pop(name)


def _origins(schema: type, overrides: Sequence[Override], files: Sequence[ConfigFile]) -> Callable[[str], str]:
    set_by_hand = {override.key_or_group for override in overrides}
    set_by_file = [(file.shown, set(_paths(schema, file.values))) for file in files]

    def where(path: str) -> str:
        if any(f"{path}.".startswith(f"{key}.") for key in set_by_hand):
            return " (on the command line)"
        for shown, paths in reversed(set_by_file):
            if path in paths:
                return f" (in {shown})"
        return ""

    return where


def _experiments(folders: Sequence[Path]) -> list[str]:
    roots = [folder / "experiment" for folder in folders]
    return sorted({str(file.relative_to(root).with_suffix("")) for root in roots for file in root.rglob("*.yaml")})


def _missing(error: MissingConfigException, folders: Sequence[Path]) -> str:
    """The sentence for a file that is not there; for an experiment, with those that are."""
    missing = error.missing_cfg_file or str(error)
    group, _, name = missing.partition("/")
    if group != "experiment":
        return f"there is no {missing}.yaml in {', '.join(_shown(folder) for folder in folders)}"
    names = _experiments(folders)
    close = nearest(name, names)
    meant = f"did you mean {close}? " if close else ""
    return f"there is no experiment {name!r}: {meant}There are {', '.join(names)}; --config-dir adds a folder of yours"
