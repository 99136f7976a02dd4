"""The configuration as the programs read it: YAML, overrides and experiments -> frozen dataclasses, strictly.

`rl.py` and `sft.py` are the wholes of the two programs; what others import by hand is here.
"""

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.program import config_dir, to_yaml
from skyrl_train.config.rl import Config, from_hydra, load_config, main_config

__all__ = ["Config", "ConfigError", "config_dir", "from_hydra", "load_config", "main_config", "to_yaml"]
