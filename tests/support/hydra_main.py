"""The `cfg` of a program with `@hydra.main`, as skyrl_train 0.4's users write them."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from skyrl_train.compat.settings import translated
from skyrl_train.config import config_dir


def composed(*arguments: str) -> DictConfig:
    """Args: arguments: of the program, before the translation of keys of 0.4."""
    lines, _ = translated(arguments)
    with initialize_config_dir(config_dir, version_base=None):
        return compose("ppo_base_config", lines)
