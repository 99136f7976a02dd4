"""A program's command line and configuration: base YAML, `+experiment=NAME` and overrides -> frozen dataclasses."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import yaml

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.config import compose
from skyrl_train.config.errors import ConfigError
from skyrl_train.config.files import experiments, shipped_folder
from skyrl_train.config.overrides import escaped, parse
from skyrl_train.config.redaction import Secrets, secrets_of
from skyrl_train.config.schema import build
from skyrl_train.config.skyrl_04.notice import report
from skyrl_train.config.skyrl_04.translate import translate

T = TypeVar("T")

config_dir: str = str(shipped_folder())
"""Folder of the bases and the experiments, in the source checkout or the installed package."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Usage: {self.usage}")


@dataclass(frozen=True, kw_only=True)
class Program(Generic[T]):
    """A command line and the configuration that it reads."""

    module: str
    """Module that `python -m` runs."""
    purpose: str
    """Sentence for `--help`."""
    schema: type[T]
    base_name: str
    """Name of the base YAML in config_dir, without `.yaml`."""
    complete: Callable[[T], T] = lambda config: config
    """Adds values that follow from others."""

    @property
    def base(self) -> Path:
        return Path(config_dir, f"{self.base_name}.yaml")

    def load(self, overrides: Sequence[str] = (), folders: Sequence[str | Path] = ()) -> T:
        """The base with `+experiment=NAME` and `key=value` overrides on top.

        Args: folders: also searched for `experiment/NAME.yaml`. Raises: ConfigError.
        """
        return self._built(compose.compose(self.schema, self.base, overrides, [Path(f) for f in folders]))

    def built(self, values: dict[str, Any]) -> T:
        """The configuration with these values, one for each key. Raises: ConfigError."""
        return self._built(compose.Composed(values, lambda path: ""))

    def _built(self, composed: compose.Composed) -> T:
        values, where = composed.values, composed.where
        report(composed.translation, values, composed.chosen)
        trainer = values.get("trainer")
        modules = trainer.get("custom_modules") if isinstance(trainer, dict) else None
        try:
            import_modules([modules] if isinstance(modules, str) else modules or ())
        except ValueError as error:
            raise ConfigError(str(error) + where("trainer.custom_modules")) from error
        return self.complete(build(self.schema, values, where))

    def read(self, argv: Sequence[str]) -> T:
        """The configuration of a command line (without the program's name); see docs/configuration.md.

        The current folder's `configs/` is searched for experiments too. Prints nothing, except that `--help` and
        `--cfg job` print and raise SystemExit(0), as argparse does.
        Raises: ConfigError.
        """
        flags = self._parser().parse_intermixed_args(list(argv))
        base, derived = self.base, dict[str, str]()
        folders = [Path("configs")] if Path("configs/experiment").is_dir() else []
        if flags.config_dir is not None:
            folders.append(Path(flags.config_dir))
            if not folders[-1].is_dir():
                raise ConfigError(f"--config-dir is {flags.config_dir}: there is no such folder")
        if flags.config_file is not None:
            folders.append(base.parent)
            base = Path(flags.config_file)
            if not base.is_file() or base.suffix != ".yaml":
                raise ConfigError(f"--config-file is {base}: there is no such .yaml file")
            derived = compose.derived_keys(self.schema, self.base, base)
        config = self._built(compose.compose(self.schema, base, flags.overrides, folders, derived))
        if flags.cfg == "job":
            print(to_yaml(config), end="")
            raise SystemExit(0)
        return config

    def naming_old_keys(self, error: ConfigError, argv: Sequence[str]) -> ConfigError:
        """An error of what `read` returned, with the keys of skyrl_train 0.4 that its problems come from."""
        overrides = self._parser().parse_intermixed_args(list(argv)).overrides
        _, translation = translate([parse(text, self.schema) for text in overrides], self.schema)
        return translation.naming_old_keys(error)

    def _parser(self) -> _Parser:
        names = ", ".join(experiments([self.base.parent]))
        parser = _Parser(
            usage=f"python -m {self.module} [+experiment=NAME] [key=value ...]",
            description=self.purpose,
            epilog=f"Every key with its value and meaning: {self.base}. Experiments: {names}.",
            allow_abbrev=False,
        )
        parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
        parser.add_argument("--config-dir", "-cd", help="folder that contains your experiment/ folder")
        parser.add_argument("--config-file", help="start from this complete file, such as the config.yaml of a run")
        parser.add_argument("--cfg", "-c", choices=["job"], help="print the configuration and exit")
        return parser

    def base_yaml(self) -> str:
        """Every key of the schema with its value in the base, `${...}` as written."""
        return compose.base_yaml(self.schema, self.base)


class _Dumper(yaml.SafeDumper):
    """Quotes text that OmegaConf, unlike YAML 1.1, takes for a number: 1e3."""


_Dumper.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeDumper.yaml_implicit_resolvers)
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def to_yaml(config: Any) -> str:
    """YAML of every value, secrets masked, which `--config-file` reads."""
    values = dataclasses.asdict(getattr(config, "written", config))
    plain = escaped(secrets_of(values).plain(values))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def secrets_in(config: Any) -> Secrets:
    return secrets_of(dataclasses.asdict(config))
