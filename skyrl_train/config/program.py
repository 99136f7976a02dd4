"""A program's configuration: its base YAML, `+experiment=NAME` and overrides -> frozen dataclasses, converted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import DictConfig

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.config import compose
from skyrl_train.config.command_line import read_command_line
from skyrl_train.config.errors import ConfigError
from skyrl_train.config.files import shipped_folder
from skyrl_train.config.redaction import Secrets, secrets_of
from skyrl_train.config.schema import build

T = TypeVar("T")

config_dir: str = str(shipped_folder())
"""Folder of the bases and the experiments, of the source checkout or of the installed package."""


@dataclass(frozen=True, kw_only=True)
class Program(Generic[T]):
    """A command line and the configuration that it reads."""

    module: str
    """`python -m` this."""
    purpose: str
    """One sentence for `--help`."""
    schema: type[T]
    base_name: str
    """Name of its YAML in config_dir, without `.yaml`."""

    @property
    def base(self) -> Path:
        return Path(config_dir, f"{self.base_name}.yaml")

    def load(self, overrides: Sequence[str] = (), folders: Sequence[str | Path] = ()) -> T:
        """The base with `+experiment=NAME` and `key=value` overrides on top.

        Args: folders are searched for `experiment/NAME.yaml` too.
        Raises: ConfigError.
        """
        composed = compose.compose(self.schema, self.base, overrides, [Path(f) for f in folders])
        return self._built(composed.values, composed.where)

    def _built(self, values: dict[str, Any], where: Callable[[str], str]) -> T:
        modules = values["trainer"].get("custom_modules")
        try:
            import_modules([modules] if isinstance(modules, str) else modules or ())
        except ValueError as error:
            raise ConfigError(str(error) + where("trainer.custom_modules")) from error
        return build(self.schema, values, where)

    def read(self, argv: Sequence[str]) -> T:
        """What a command line (without the program's name) asks for; docs/configuration.md says what it may hold.

        Prints nothing, except that `--help` and `--cfg job` print and raise SystemExit(0), as argparse does.
        Raises: ConfigError.
        """
        request = read_command_line(argv, self.base, self.module, self.purpose)
        composed = compose.compose(self.schema, request.base, request.overrides, request.folders)
        config = self._built(composed.values, composed.where)
        if request.print_config:
            print(to_yaml(config), end="")
            raise SystemExit(0)
        return config

    def from_hydra(self, cfg: DictConfig) -> T:
        """What `@hydra.main(config_path=config_dir, config_name=BASE_NAME, version_base=None)` hands over.

        Raises: ConfigError.
        """
        return self._built(*compose.of_hydra(self.schema, cfg))

    def base_yaml(self) -> str:
        """Every key of the schema with its value in the base, `${...}` as written."""
        return compose.base_yaml(self.schema, self.base)


def to_yaml(config: Any) -> str:
    """Every value, in the order of the dataclasses, with secrets masked; `--config-file` reads it again."""
    values = dataclasses.asdict(config)
    return yaml.safe_dump(secrets_of(values).plain(values), sort_keys=False, allow_unicode=True)


def secrets_in(config: Any) -> Secrets:
    """The secrets of a program's configuration and of its environment."""
    return secrets_of(dataclasses.asdict(config))
