"""Ray cluster of a run: an existing one, or a local one that ends with the run."""

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

from skyrl_train.device import device_type
from skyrl_train.hf.hub import cache_folder

log = logging.getLogger(__name__)

# Spinning OpenMP threads of several processes on the same cores cost more than they gain; compiling small functions on
# the CPU costs seconds and gains nothing.
# A cluster without GPUs may run on machines that have some (`ray start --num-gpus=0`).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAY_DEDUP_LOGS": "0"}
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
STARTED = "SKYRL_TRAIN_RAY"
"""Environment variable that `start` sets, for this process and those of a local Ray: local or joined."""
CONNECT_S = 10
"""Timeout for the host of RAY_ADDRESS."""


@dataclass(frozen=True, slots=True)
class Cluster:
    address: str
    is_local: bool
    """Started by this run and stopped with it."""
    has_gpus: bool


@contextlib.contextmanager
def connect() -> Iterator[Cluster]:
    """Join the cluster named by RAY_ADDRESS (`ray job submit` sets it), or start a local one; leave it at the end.

    In a Ray task, and after `start`, the session of this process is used, and stays.

    Raises: ValueError if that cluster does not answer, if the driver is outside of it, or if this process is already
        connected.
    """
    if ray.is_initialized() and (STARTED in os.environ or ray._private.worker.global_worker.mode == ray.WORKER_MODE):
        yield joined(is_local=os.environ.get(STARTED) == "local")
        return
    if ray.is_initialized():
        raise ValueError("this process is already connected to Ray. Call ray.shutdown() before a run")
    is_local = _connected(**QUIET)
    try:
        yield joined(is_local=is_local)
    finally:
        ray.shutdown()


def start() -> None:
    """Join or start Ray like `connect`, until the process ends, for a run in this process or in its tasks.

    The tasks' output is shown. Does nothing in a connected process. Raises: like `connect`.
    """
    if not ray.is_initialized():
        os.environ[STARTED] = "joined" if os.environ.get("RAY_ADDRESS") else "local"
        _connected(**{**QUIET, "log_to_driver": True})


def joined(*, is_local: bool) -> Cluster:
    """The cluster that this process has joined."""
    address = str(ray.get_runtime_context().gcs_address)
    return Cluster(address, is_local, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)


def _connected(**arguments: Any) -> bool:
    """Join or start Ray. Returns: whether it is local."""
    _silence_raylet()
    address = os.environ.get("RAY_ADDRESS") or "local"
    _check_answers(address)
    # Ray would empty CUDA_VISIBLE_DEVICES of actors that ask for no GPU; newer versions warn about it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    # A local Ray would run workers at niceness 15.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It would also start a worker per core in advance, which no actor here can use: they have their own environments.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    try:
        with _signal_handlers_kept(), _lean_node(shows_output=arguments["log_to_driver"]):
            _start_or_join(address, runtime_env={"env_vars": worker_environment()}, **arguments)
            return address == "local"
    except (ConnectionError, AuthenticationError) as error:
        raise ValueError(_refused_token(address) if is_refused_token(error) else _no_cluster(address)) from error


def _start_or_join(address: str, **arguments: Any) -> None:
    """Retry a local Ray once, beside the remains of the first until this process ends. A node (Ray 2.60) exits if one
    of its helpers takes more than 15 s to start, as on a machine that stalls.
    """
    try:
        ray.init(address=address, **arguments)
    except Exception as error:
        if address != "local" or "timed out during startup" not in str(error):
            raise
        log.warning("local Ray did not start in time, retrying: %s", error)
        ray.init(address=address, **arguments)


def known_device_type() -> str | None:
    """Device type of engines that certainly run on this machine; None with a Ray cluster, and in Ray's processes, from
    which Ray may hide the GPUs.
    """
    return None if os.environ.get("RAY_ADDRESS") or ray.is_initialized() else device_type()


def attach(address: str) -> None:
    """Join a running cluster until `ray.shutdown`. Args: address: host:port, or "auto" for this node's.
    Raises: ValueError if it does not answer.
    """
    _silence_raylet()
    unanswered = f"no Ray cluster answers at {address!r}. Use the address that the service printed when it started"
    _check_answers(address, unanswered)
    try:
        with _signal_handlers_kept():
            ray.init(address=address, **QUIET)
    except (ConnectionError, AuthenticationError) as error:
        raise ValueError(_refused_token(address) if is_refused_token(error) else unanswered) from error


def is_refused_token(error: BaseException | None) -> bool:
    """Whether a connection failed because the cluster wants a token. Ray 2.60 wraps that error as text."""
    while error is not None:
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refused_token(address: str) -> str:
    return (
        f"the Ray cluster at {address!r} refused this program's token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH to those of the cluster"
    )


def _check_answers(address: str, unanswered: str = "") -> None:
    """Raises: ValueError, by default about RAY_ADDRESS; Ray (2.60) itself retries for more than five minutes where
    nothing listens.
    """
    host, separator, port = address.rpartition(":")
    if "://" in address:
        raise ValueError(
            f"RAY_ADDRESS is {address!r}: the driver must run inside the cluster. Start it with `ray job submit`, or "
            "on a node with RAY_ADDRESS=auto"
        )
    if separator and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise ValueError(unanswered or _no_cluster(address)) from error


def _no_cluster(address: str) -> str:
    return (
        f"RAY_ADDRESS is {address!r}, but no Ray cluster answers there. Start one with `ray start --head`, or unset "
        "RAY_ADDRESS to run on this machine alone"
    )


def worker_environment() -> dict[str, str]:
    """Environment variables of every process of the run, except those that the submitted job sets. Ray refuses a
    variable that both the job and its driver set, even to the same value.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    taken = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {name: value for name, value in WORKER_ENVIRONMENT.items() if name not in taken}


def cpu_environment() -> dict[str, str]:
    """Environment variables of each rank or engine without a GPU, except those that the submitted job sets; they must
    be set before its process imports torch.
    """
    taken = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return {name: value for name, value in CPU_ENVIRONMENT.items() if name not in taken}


def hub_environment(node: str) -> dict[str, str]:
    """Environment variables of a rank or engine on this node. On the driver's they name the cache in which the driver
    has checked the hub's models: the shell that called `ray start` may have another HF_HOME.
    """
    return {"HF_HUB_CACHE": cache_folder()} if node == ray.get_runtime_context().get_node_id() else {}


def _silence_raylet() -> None:
    """Keep Ray's paragraph about each dead process (2.60, despite `log_to_driver`) off the console; RemoteFailed is one
    line.
    """
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
def _lean_node(*, shows_output: bool) -> Iterator[None]:
    """Start a local Ray with what a run uses: no autoscaler, no API server, and a log monitor only for `shows_output`.
    The three (2.60) cost each run 2 s of CPU time and 0.3 GiB.

    Its processes also keep clear of signals to the driver's group (`timeout`, a batch system): a driver whose Ray was
    killed waits 60 s for it (2.60) and is then aborted, losing its step and report.
    """
    services, parameter = ray._private.services, ray._private.parameter
    kept = services.ConsolePopen, services.start_api_server, parameter.RayParams
    services.ConsolePopen = functools.partial(services.ConsolePopen, process_group=0)
    services.start_api_server = lambda *_, **__: (None, None)  # no URL, no process: Ray's own answer if it cannot start
    parameter.RayParams = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor=shows_output)
    try:
        yield
    finally:
        services.ConsolePopen, services.start_api_server, parameter.RayParams = kept


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers after Ray's start; its own SIGTERM handler exits (2.60: after draining for up to 30 s)."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
