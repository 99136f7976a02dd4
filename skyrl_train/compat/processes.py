"""Start of Ray, as skyrl_train 0.4's programs call it."""

from __future__ import annotations

import time
from typing import Any

from omegaconf import DictConfig

from skyrl_train.cluster.session import start
from skyrl_train.compat.settings import validate_cfg


def initialize_ray(cfg: DictConfig) -> None:
    """Join or start Ray for this process and its tasks; may be called twice. Registered losses and estimators are
    imported by the processes of a run (`validate_cfg`). Raises: like `validate_cfg`; ValueError without a cluster.
    """
    validate_cfg(cfg)
    start()


class Timer:
    """Adds the seconds of its body to `timings`."""

    def __init__(self, message: str, update_dict: dict[str, Any] | None = None) -> None:
        self.message, self.update_dict = message, update_dict

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self.update_dict is not None:
            seconds = time.perf_counter() - self._started
            self.update_dict[self.message] = self.update_dict.get(self.message, 0.0) + seconds

    async def __aenter__(self) -> Timer:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)
