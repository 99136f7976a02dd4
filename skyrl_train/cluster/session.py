"""The Ray cluster of a run: the one that is there, or a local one for as long as the run lives."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import AuthenticationError

log = logging.getLogger(__name__)

# Spinning OpenMP threads of several processes on the same cores cost more than they bring; compiling small functions
# on the CPU costs seconds and gains nothing.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAY_DEDUP_LOGS": "0"}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
CONNECT_S = 10
"""Longest wait for the host of RAY_ADDRESS."""


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

    Raises: ValueError if RAY_ADDRESS names a cluster that does not answer, or one that the driver is outside of, or if
        this process is connected already.
    """
    if ray.is_initialized():
        raise ValueError("this process is connected to Ray already: call ray.shutdown() before a run")
    _keep_rays_words_from_console()
    address = os.environ.get("RAY_ADDRESS") or "local"
    _check_answers(address)
    # Ray would hide GPUs from actors that ask for none by emptying CUDA_VISIBLE_DEVICES; newer versions warn of it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    # A local Ray would run workers at niceness 15, behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It would also start a worker per core ahead, which no actor here can use: they have environments of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        with _signal_handlers_kept(), _own_process_groups():
            context = _start_or_join(address, runtime_env={"env_vars": worker_environment()}, **local)
    except ConnectionError as error:
        raise ValueError(_no_cluster(address)) from error
    try:
        yield Cluster(
            address=str(context.address_info["address"]),
            is_local=address == "local",
            has_gpus=ray.cluster_resources().get("GPU", 0) > 0,
        )
    finally:
        ray.shutdown()


def _start_or_join(address: str, **arguments: Any) -> Any:
    """Ray's context; a local Ray has a second try, beside what is left of the first until this process ends.

    A node (Ray 2.60) ends itself if one of its helpers takes more than 15 s to start, as on a machine that stands still
    for a while, and Ray gives it up after 30 s.
    """
    try:
        return ray.init(address=address, **QUIET, **arguments)
    except Exception as error:
        if address != "local" or "timed out during startup" not in str(error):
            raise
        log.warning("local Ray did not start in time and is started once more: %s", error)
        return ray.init(address=address, **QUIET, **arguments)


def attach(address: str) -> None:
    """Join a cluster that runs, until `ray.shutdown`. Args: address is host:port, or "auto" for this node's.

    Raises: ValueError if it does not answer.
    """
    _keep_rays_words_from_console()
    _check_answers(address)
    try:
        with _signal_handlers_kept():
            ray.init(address=address, **QUIET)
    except (ConnectionError, AuthenticationError) as error:
        if isinstance(error, AuthenticationError) or isinstance(_first_cause(error), AuthenticationError):
            raise ValueError(
                f"the Ray cluster at {address!r} refused this program's token: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH where the cluster was started with them"
            ) from error
        raise ValueError(f"no Ray cluster answers at {address!r}") from error


def _first_cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _check_answers(address: str) -> None:
    """Ray (2.60) itself tries for more than five minutes to reach a host where nothing listens."""
    host, separator, port = address.rpartition(":")
    if "://" in address:
        raise ValueError(
            f"RAY_ADDRESS is {address!r}: the driver must run inside the cluster; start it with `ray job submit`, "
            "or on a node with RAY_ADDRESS=auto"
        )
    if separator and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise ValueError(_no_cluster(address)) from error


def _no_cluster(address: str) -> str:
    return (
        f"RAY_ADDRESS is {address!r}, but no Ray cluster answers there; start one with `ray start --head`, or unset "
        "RAY_ADDRESS to run on this machine alone"
    )


def worker_environment() -> dict[str, str]:
    """Environment variables of every process of the run. What the submitted job sets itself is left to it.

    Ray refuses a variable that both the job and its driver set, even to the same value.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    taken = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in taken}


def cpu_environment() -> dict[str, str]:
    """Environment variables of each rank or engine that has no GPU, whatever the driver's node has. They must be set
    before its process imports torch. What the submitted job sets itself is left to it."""
    taken = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return {name: value for name, value in CPU_ENVIRONMENT.items() if name not in taken}


def _keep_rays_words_from_console() -> None:
    """Ray (2.60) prints a paragraph about each dead process, whatever `log_to_driver` says; RemoteFailed is a line."""
    plain = getattr(ray._private.worker, "print_to_stdstream", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def print_unless_raylet(data: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if data.get("pid") == "raylet":
            log.debug("%s", "\n".join(data["lines"]))
        else:
            plain(data, *arguments, **named)

    ray._private.worker.print_to_stdstream = print_unless_raylet


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """A signal to the driver's group (`timeout`, a batch system) is the driver's to answer.

    A driver whose Ray it has ended waits 60 s for it (2.60) and is then aborted, without its step and without a report.
    """
    popen = ray._private.services.ConsolePopen
    ray._private.services.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        ray._private.services.ConsolePopen = popen


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray's own SIGTERM handler ends the process on the spot (2.60: after draining for up to 30 s)."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
