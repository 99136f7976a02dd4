"""The YAML files of a composition: their contents, and keys that the schema does not have."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.schema import key_types, unknown_key


@dataclass(frozen=True)
class ConfigFile:
    """One YAML file of a composition."""

    shown: str
    """Path relative to the working directory, if below it."""
    package: str
    """Section into which Hydra puts its keys, "" for the top level."""
    values: dict[str, Any]
    """Contents from the top level down, interpolations unresolved."""
    is_lower_base: bool
    """Base of another program, on which this one builds; it may have keys that this program does not."""
    is_experiment: bool = False


def shipped_folder() -> Path:
    """`configs/` inside the installed package, or beside the package in a source checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def is_shipped(file: ConfigFile) -> bool:
    """Whether the file is a base of this package."""
    return not file.is_experiment and Path(file.shown).resolve().parent == shipped_folder().resolve()


def experiments(folders: Sequence[Path]) -> list[str]:
    roots = [folder / "experiment" for folder in folders]
    return sorted({str(file.relative_to(root).with_suffix("")) for root in roots for file in root.rglob("*.yaml")})


def chosen_files(hydra: DictConfig, base: str | None, lines: Sequence[str]) -> list[ConfigFile]:
    """Every file of the composition in order, except Hydra's own; `hydra` is the node of that name.

    Raises: ConfigError where a name matches two files.
    """
    folders = [folder for source in hydra.runtime.config_sources if (folder := _folder(source)) is not None]
    loader = GlobalHydra.instance().config_loader()
    found = []
    for default in loader.compute_defaults_list(base, list(lines), RunMode.RUN).defaults:
        name = default.config_path
        if name is None or name.startswith("hydra/"):
            continue
        matches = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
        shown = [shown_path(file) for file in matches]
        if len(matches) > 1 and name != base:
            raise ConfigError(f"{name} is ambiguous: it matches {' and '.join(shown)}. Rename yours")
        if matches:
            package = default.package or ""
            lower = name != base and "/" not in name
            contents = _contents(matches[0], package)
            found.append(ConfigFile(shown[0], package, contents, is_lower_base=lower, is_experiment="/" in name))
    return found


def _folder(source: DictConfig) -> Path | None:
    """Folder of an entry of the search path; None for Hydra's own and entries that are not folders."""
    if source.schema == "file":
        return Path(source.path)
    if source.schema == "pkg" and not source.path.startswith("hydra"):
        return Path(str(importlib.resources.files(source.path)))
    return None


def _contents(file: Path, package: str) -> dict[str, Any]:
    """Contents of a file, nested below its package."""
    loaded = _loaded(file, file.stat().st_mtime_ns)
    values: dict[str, Any] = {name: item for name, item in loaded.items() if name != "defaults"}
    for name in reversed(package.split(".")) if package else ():
        values = {name: values}
    return values


@functools.lru_cache(maxsize=32)  # reading the base took a third of the time of a configuration
def _loaded(file: Path, changed_ns: int) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file), resolve=False))


def shown_path(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def dotted_keys(schema: type, values: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in a file; keys below unknown ones and below free-form mappings are not listed."""
    kinds = key_types(schema)
    for name in values if isinstance(values, dict) else ():
        path = f"{prefix}{name}"
        yield path
        if dataclasses.is_dataclass(kinds.get(path)):
            yield from dotted_keys(schema, values[name], f"{path}.")


def check_files(schema: type, files: Sequence[ConfigFile]) -> None:
    problems = []
    for file in files:
        if file.package == "experiment":
            problems.append(f"{file.shown}: the first line is missing. Add `# @package _global_`")
            continue
        if not file.is_lower_base and (other := _other_program(file, schema)) is not None:
            problems.append(other)
        elif not file.is_lower_base:
            problems += [f"{unknown_key(path, schema)} (in {file.shown})" for path in _foreign(file, schema)]
    if problems:
        raise ConfigError(problems)


def _other_program(file: ConfigFile, schema: type) -> str | None:
    """The error for a file of another program: it has keys that this schema lacks and the other one has."""
    from skyrl_train.config.rl import RL  # both import this module
    from skyrl_train.config.sft import SFT

    foreign = _foreign(file, schema)
    for program in (RL, SFT):
        if foreign and not issubclass(schema, program.schema) and not _foreign(file, program.schema):
            kind, given = "an experiment", f"+experiment={Path(file.shown).stem}"
            if not file.is_experiment:
                kind, given = "a configuration", f"--config-file {file.shown}"
            return (
                f"{file.shown} is {kind} of another program: this one has no {', '.join(foreign[:3])}. Run "
                f"python -m {program.module} {given}"
            )
    return None


def _foreign(file: ConfigFile, schema: type) -> list[str]:
    """Keys that the schema does not have."""
    kinds = key_types(schema)
    return [path for path in dotted_keys(schema, file.values) if path not in kinds]


def leave_out_foreign(config: DictConfig, schema: type, files: Sequence[ConfigFile]) -> None:
    """Remove keys that only another program reads."""
    for path in [path for file in files if file.is_lower_base for path in _foreign(file, schema)]:
        section, _, name = path.rpartition(".")
        node = OmegaConf.select(config, section) if section else config
        del node[name]  # `pop` would resolve the value, whose target may be gone
