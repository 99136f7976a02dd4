"""The Ray cluster of a run: the one that is there, or a local one for as long as the run lives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from skyrl_train.device import device_type

# Spinning OpenMP threads of several processes on the same cores cost more than they bring; compiling small functions
# on the CPU costs seconds and gains nothing.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAY_DEDUP_LOGS": "0"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the driver knows of the cluster."""

    address: str
    is_local: bool
    """Started by this run and stopped with it."""
    has_gpus: bool


@contextlib.contextmanager
def connect() -> Iterator[Cluster]:
    """Join the cluster named by RAY_ADDRESS (`ray job submit` sets it), or start a local one; leave it at the end.

    Raises: ValueError if RAY_ADDRESS names a cluster that does not answer.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    environment = dict(WORKER_ENVIRONMENT)
    if device_type() == "cpu":
        environment |= CPU_ENVIRONMENT
    # Ray would hide GPUs from actors that ask for none by emptying CUDA_VISIBLE_DEVICES; newer versions warn of it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        context = ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            runtime_env={"env_vars": environment},
            **local,
        )
    except ConnectionError as error:
        raise ValueError(
            f"RAY_ADDRESS is {address!r}, but no Ray cluster answers there; start one with `ray start --head`, or "
            "unset RAY_ADDRESS to run on this machine alone"
        ) from error
    try:
        yield Cluster(
            address=str(context.address_info["address"]),
            is_local=address == "local",
            has_gpus=ray.cluster_resources().get("GPU", 0) > 0,
        )
    finally:
        ray.shutdown()
