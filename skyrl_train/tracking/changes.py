"""Differences of a run's configuration from the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.compose import resolved


def changed_values(config_yaml: str, base_yaml: str) -> dict[str, Any]:
    """Dotted key -> value of everything that differs from the base; lists are compared as a unit.

    Args: config_yaml: resolved; base_yaml: may contain `${...}`. A key that refers to another one in the base
        (`run_dir: runs/${trainer.run_name}`) counts only if its value differs from the resolved reference.
    """
    config = yaml.safe_load(config_yaml)
    # OmegaConf reads `1e-6` as a number, as Hydra does and PyYAML does not.
    base = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(base_yaml), resolve=False))
    followed = resolved(cast(DictConfig, OmegaConf.create(_laid_over(config, base))))
    return _changes(config, base, followed)


def _follows(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _laid_over(config: Any, base: Any) -> Any:
    """The configuration's values, with the base's `${...}` in place of those that have one."""
    if _follows(base):
        return base
    if isinstance(config, Mapping):
        below = base if isinstance(base, Mapping) else {}
        return {key: _laid_over(value, below.get(key)) for key, value in config.items()}
    return _as_text(config)


def _as_text(value: Any) -> Any:
    """The value with every `${`, which is plain text in a resolved configuration, escaped."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value.replace("${", "$ {") if isinstance(value, str) else value


def _changes(config: Mapping[str, Any], base: Mapping[str, Any], followed: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            inner = _changes(value, base[key], followed[key])
            changes |= {f"{key}.{name}": changed for name, changed in inner.items()}
        elif key not in base or (followed[key] != _as_text(value) if _follows(base[key]) else base[key] != value):
            changes[key] = value
    return changes
