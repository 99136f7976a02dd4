"""Start of Ray, as skyrl_train 0.4's programs call it."""

from __future__ import annotations

from omegaconf import DictConfig

from skyrl_train.cluster.session import start
from skyrl_train.compat.settings import validate_cfg


def initialize_ray(cfg: DictConfig) -> None:
    """Join or start Ray for this process and its tasks; may be called twice. Registered losses and estimators are
    imported by the processes of a run (`validate_cfg`). Raises: like `validate_cfg`; ValueError without a cluster.
    """
    validate_cfg(cfg)
    start()
