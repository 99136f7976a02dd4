"""A service's JobRunner around fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from skyrl_train.config import load_config
from skyrl_train.service.runner import JobRunner, SavedVersion
from skyrl_train.service.source import JobSource
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.credit import Coefficients
from skyrl_train.trainer.publisher import Publisher

ADAPTIVE = ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.use_kl_loss=false"]
ADAPTIVE.append("trainer.algorithm.kl_ctrl.type=adaptive")


def job_runner(
    policy: Any, engines: Any, residency: Any, *, tuning: Any = None, state_path: str | None = None
) -> JobRunner:
    """Its steps on groups only take them from the source."""
    timers = Timers()
    version = SavedVersion(policy, timers, state_path)
    source = JobSource(lambda: version.policy_version)
    step: Any = SimpleNamespace(step=source.next, coefficients=Coefficients(load_config(ADAPTIVE).trainer.algorithm))
    publisher = Publisher(residency, timers, version.write)
    return JobRunner(policy, engines, residency, version, source, step, tuning, publisher, timers)
