"""Client of a service; many programs may connect and disconnect."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.devices import endpoint_warning
from skyrl_train.cluster.session import attach, connect, hub_environment, joined, worker_environment
from skyrl_train.config import Config
from skyrl_train.hf.hub import address_problem
from skyrl_train.service.actor import ServiceActor, State
from skyrl_train.service.checks import check_service, checked_model
from skyrl_train.service.job import ChatSample, TokenSample
from skyrl_train.service.queue import ServiceBroken
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)
NAMESPACE = "skyrl_train"
POLL_S = 20.0
ANSWER_S = 30.0
"""Timeout of a request for the state of a started service."""
CLOSE_S = 60.0
"""Timeout of `stop`."""
MAX_CONCURRENCY = 20_000
"""Concurrent calls: waiting jobs and readers of metrics, behind which no other call may queue."""
Group = Iterable[ChatSample | TokenSample | Mapping[str, Any]]


class TrainingService:
    """A policy that trains on submitted samples while its engines serve over HTTP."""

    def __init__(self, actor: Any, name: str, address: str, state: State, at_end: ExitStack) -> None:
        """Use `start` or `connect`."""
        self._handle, self._state, self._at_end = actor, state, at_end
        self._is_stopped = False
        self.name = name
        self.address = address
        """Address of its Ray cluster, for `connect`."""

    @classmethod
    def start(
        cls, config: Config, name: str = "trainer", *, keep_state: bool = True, outlives: bool = True
    ) -> TrainingService:
        """Start a service and wait until it is ready.

        It runs in the Ray cluster that this program has joined, or that RAY_ADDRESS names, and outlives this program.
        Without either a local Ray is started, which ends with this program.

        Args: keep_state: write the trainer's state (weights and optimizer) to trainer.placement.state_path after each
            job, so that a failed job can be rolled back; outlives: False to end it with this program, even if killed.
        Raises: ValueError for an invalid configuration or a name in use; RemoteFailed if a process cannot start.
        """
        check_service(config)
        if Path(config.trainer.policy.model.path).expanduser().is_dir():
            checked_model(config)  # the service downloads and checks a hub name on its own node
        at_end = ExitStack()
        try:
            if ray.is_initialized():
                cluster = joined(is_local=False)
            else:
                cluster = at_end.enter_context(connect())
            if _find(name) is not None:
                raise ValueError(
                    f"name is {name}: a service with this name runs in the cluster. Use "
                    f"TrainingService.connect({name!r}), or another name"
                )
            environment = _environment(config, os.environ)  # the service may run on another node
            actor = _place(name, outlives).remote(os.getcwd(), config, cluster, keep_state, environment)
            try:
                state = _answer(actor.state.remote())
            except BaseException:
                try:
                    with contextlib.suppress(RayError):
                        ray.get(actor.close.remote(), timeout=CLOSE_S)
                finally:
                    ray.kill(actor)
                raise
        except BaseException:
            at_end.close()
            raise
        if (warning := endpoint_warning(config.generator)) is not None:
            log.warning(warning)
        # A local Ray must end while Python still has its modules.
        atexit.register(at_end.close)
        return cls(actor, name, cluster.address, state, at_end)

    @classmethod
    def connect(cls, name: str = "trainer", address: str = "auto") -> TrainingService:
        """Use a running service. Args: address of its Ray cluster; ignored if this program has joined one.

        Raises: ValueError if there is no such cluster or service.
        """
        with ExitStack() as stack:
            if not ray.is_initialized():
                attach(address)
                stack.callback(ray.shutdown)
            actor = _find(name)
            if actor is None:
                raise ValueError(f"name is {name}: no service with this name runs in the Ray cluster {address}")
            state = _answer(actor.state.remote())
            stack.pop_all()
        return cls(actor, name, str(ray.get_runtime_context().gcs_address), state, ExitStack())

    async def train(self, groups: Iterable[Group]) -> Metrics:
        """Train on groups, each a list of the samples of one prompt (docs/service.md). Returns: the job's metrics.

        When it returns, the engines serve the new version and the job's memory is free.
        Raises: ValueError naming the group and sample, before anything is queued; StaleSamples, JobFailed if the job
            had no effect; ServiceBroken if the service can no longer train.
        """
        return await self._call(self._actor.train.remote(listed(groups, 2)))

    async def train_sft(self, rows: Iterable[Mapping[str, Any]]) -> Metrics:
        """One step of supervised fine-tuning on rows as in docs/sft.md. Returns, raises: like `train`."""
        return await self._call(self._actor.train_sft.remote(listed(rows, 1)))

    async def save(self, folder: str) -> None:
        """Write a Hugging Face checkpoint after the jobs before. Raises: like `train`.

        Args: folder: on the trainer's nodes.
        """
        if not folder:
            raise ValueError("save(''): it must be a folder")
        if (problem := address_problem("the folder to save", folder)) is not None:
            raise ValueError(problem)
        await self._call(self._actor.save.remote(os.path.abspath(os.path.expanduser(folder))))

    async def metrics(self, after: int = 0) -> AsyncIterator[Metrics]:
        """Metrics of each finished job, starting after job number `after` (`service/job`), without end.

        Raises: ServiceBroken when the service has ended or can no longer train.
        """
        while True:
            after, records = await self._call(self._actor.metrics_after.remote(after, POLL_S))
            for record in records:
                yield record

    @property
    def openai_base_url(self) -> str:
        """URL of the first engine. Raises: like `openai_base_urls`."""
        return self.openai_base_urls[0]

    @property
    def openai_base_urls(self) -> tuple[str, ...]:
        """URLs of the engines that are up, for clients that distribute requests; a replacement may have another one.

        Raises: ValueError if the configuration has no endpoint, ConnectionError while no engine is up, ServiceBroken
            if none will be.
        """
        self._refresh()
        if not self._state.has_endpoint:
            raise ValueError(
                "generator.enable_http_endpoint is false: the service has no HTTP endpoint. Set it to true"
            )
        if not self._state.urls and self._state.broken is not None:
            raise ServiceBroken(f"no engine of the service is up, and it can no longer train: {self._state.broken}")
        if not self._state.urls:
            raise ConnectionError("no engine of the service is up: dead ones are being replaced. Retry in a minute")
        return tuple(f"{url}/v1" for url in self._state.urls)

    @property
    def model_name(self) -> str:
        """Name over HTTP for the newest weights; `NAME@VERSION` is an error once another version is served. An answer's
        `policy_versions` are the versions that generated it (docs/serving.md).
        """
        return self._state.model_name

    @property
    def policy_version(self) -> int:
        self._refresh()
        return self._state.policy_version

    @property
    def broken(self) -> str | None:
        """Reason why it can no longer train, or None; its engines may still serve the last version.

        Raises: ServiceBroken if it has ended, TimeoutError if its process does not respond.
        """
        self._refresh()
        return self._state.broken

    @property
    def run_dir(self) -> str:
        """Folder of metrics.jsonl and logs, on the service's node."""
        return self._state.run_dir

    def stop(self) -> None:
        """End the service, all its processes, and the local Ray if `start` started one. Further calls do nothing.

        Raises: ServiceBroken if its process had ended already or was killed.
        """
        if self._is_stopped:
            return
        try:
            _answer(self._actor.close.remote(), CLOSE_S)
        except TimeoutError as error:
            raise ServiceBroken(f"{error}, and was killed") from None
        finally:
            ray.kill(self._actor)
            self._is_stopped = True
            self._at_end.close()

    def _refresh(self) -> None:
        """Raises: ServiceBroken if it has ended, TimeoutError if its process is stopped or too busy."""
        self._state = _answer(self._actor.state.remote(), ANSWER_S)

    @property
    def _actor(self) -> Any:
        """Raises: ServiceBroken after `stop`, when a call to an ended Ray would start a new cluster."""
        if self._is_stopped:
            raise ServiceBroken("the service was stopped by this program")
        return self._handle

    async def _call(self, ref: Any) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except RayError as error:
            raise _plain(error) from None


def _environment(config: Config, own: Mapping[str, str]) -> dict[str, str]:
    """The client's variables that a service reads. The key of running servers is not needed where engines are local."""
    key, has_wandb = config.generator.remote_api_key_env, "wandb" in config.trainer.logger
    return {name: value for name, value in own.items() if name == key or (has_wandb and name.startswith("WANDB_"))}


def listed(given: Any, depth: int) -> Any:
    """Iterables, nested up to `depth`, as lists for Ray; the service rejects anything else."""
    if depth == 0 or isinstance(given, str | bytes | Mapping | ChatSample | TokenSample):
        return given
    if not isinstance(given, Iterable):
        return given
    return [listed(item, depth - 1) for item in given]


def _answer(ref: Any, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"the service's process did not respond within {timeout_s:g} s") from None
    except RayError as error:
        raise _plain(error) from None


def _plain(error: Exception) -> Exception:
    """The service's own error instead of Ray's."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return ServiceBroken(f"the service's process has ended: {error}")


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _place(name: str, outlives: bool) -> Any:
    here = ray.get_runtime_context().get_node_id()
    return ray.remote(ServiceActor).options(  # type: ignore[attr-defined]
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if outlives else None,
        num_cpus=0,
        max_concurrency=MAX_CONCURRENCY,
        runtime_env={"env_vars": worker_environment() | hub_environment(here)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
    )
