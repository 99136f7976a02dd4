"""The flags of every program beside its overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.files import experiments


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    base: Path
    """File with every key."""
    overrides: tuple[str, ...]
    folders: tuple[Path, ...]
    """Searched for experiments."""
    print_config: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {self.usage}")


def read_command_line(argv: Sequence[str], base: Path, module: str, purpose: str) -> Request:
    """Flags and overrides apart. The current folder's `configs/` is searched for experiments as well."""
    parser = _Parser(
        usage=f"python -m {module} [+experiment=NAME] [key=value ...]",
        description=purpose,
        epilog=f"Every key with its value and meaning: {base}. Experiments: {', '.join(experiments([base.parent]))}.",
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
