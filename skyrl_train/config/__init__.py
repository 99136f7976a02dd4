"""The configuration: YAML, experiments and overrides -> frozen dataclasses, strictly.

Read `program` (command line), `compose` (Hydra), `schema` (types), then the programs `rl`, with `algorithm`,
and `sft`.
"""

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.program import config_dir, to_yaml
from skyrl_train.config.rl import Config, load_config, main_config

__all__ = ["Config", "ConfigError", "config_dir", "load_config", "main_config", "to_yaml"]
