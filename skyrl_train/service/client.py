"""The handle by which programs use a service; many may hold one, and may come and go."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.session import Cluster, attach, connect, worker_environment
from skyrl_train.config import Config
from skyrl_train.service.actor import ServiceActor, State
from skyrl_train.service.checks import check_service
from skyrl_train.service.job import ChatSample, TokenSample
from skyrl_train.service.model import checked_model
from skyrl_train.service.queue import ServiceBroken
from skyrl_train.types import Metrics

NAMESPACE = "skyrl_train"
POLL_S = 20.0
ANSWER_S = 30.0
"""Patience with a service that has started and is asked how it is."""
CLOSE_S = 60.0
"""Patience with a service that is to end."""
MAX_CONCURRENCY = 1000
"""Jobs that wait and readers of metrics are calls in flight."""
Group = Iterable[ChatSample | TokenSample | Mapping[str, Any]]


class TrainingService:
    """A policy that is trained on what callers hand in, while its engines answer over HTTP."""

    def __init__(self, actor: Any, name: str, address: str, state: State, at_end: ExitStack) -> None:
        """Use `start` or `connect`."""
        self._handle, self._state, self._at_end = actor, state, at_end
        self._is_stopped = False
        self.name = name
        self.address = address
        """Of its Ray cluster, for `connect`."""

    @classmethod
    def start(cls, config: Config, name: str = "trainer", *, keep_state: bool = True) -> TrainingService:
        """Start a service and wait until it is ready.

        It lives in the Ray cluster that this program has joined, or that RAY_ADDRESS names, and outlives this program
        there. Without either a local Ray is started, which ends with this program.

        Args: keep_state: write the trainer's state after each job (weights and optimizer, into
            trainer.placement.state_path), so that a job that dies halfway can be taken back.
        Raises: ValueError if it cannot work or the name is taken; RemoteFailed if a process cannot start.
        """
        check_service(config)
        if Path(config.trainer.policy.model.path).expanduser().is_dir():
            checked_model(config)  # a hub name is downloaded by the service's process on its own node, which checks it
        at_end = ExitStack()
        try:
            cluster = _joined() if ray.is_initialized() else at_end.enter_context(connect())
            if _find(name) is not None:
                raise ValueError(
                    f"a service {name!r} runs in this cluster: use TrainingService.connect({name!r}), or another name"
                )
            actor = _place(name).remote(os.getcwd(), config, cluster, keep_state, _named_variables(config))
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
        # A local Ray ends with this program, and is to do so while Python still has its modules.
        atexit.register(at_end.close)
        return cls(actor, name, cluster.address, state, at_end)

    @classmethod
    def connect(cls, name: str = "trainer", address: str = "auto") -> TrainingService:
        """Use a service that runs. Args: address of its Ray cluster; not read where this program has joined one.

        Raises: ValueError if there is no such cluster or service.
        """
        with ExitStack() as stack:
            if not ray.is_initialized():
                attach(address)
                stack.callback(ray.shutdown)
            actor = _find(name)
            if actor is None:
                raise ValueError(f"no service {name!r} runs in the Ray cluster {address}")
            state = _answer(actor.state.remote())
            stack.pop_all()
        return cls(actor, name, str(ray.get_runtime_context().gcs_address), state, ExitStack())

    async def train(self, groups: Iterable[Group]) -> Metrics:
        """Train on groups, each a list of the samples of one prompt (docs/service.md). Returns: the job's metrics.

        When it returns the engines serve the new version, and all memory that the job took is free again.
        Raises: ValueError naming the group and sample, before anything is queued; StaleSamples, JobFailed if the job
            had no effect; ServiceBroken if the service can train no more.
        """
        return await self._call(self._actor.train.remote(listed(groups, 2)))

    async def train_sft(self, rows: Iterable[Mapping[str, Any]]) -> Metrics:
        """One step of supervised fine-tuning on rows as in docs/sft.md. Returns and raises: as `train`."""
        return await self._call(self._actor.train_sft.remote(listed(rows, 1)))

    async def save(self, folder: str) -> None:
        """Write a Hugging Face checkpoint of the model as it is when the jobs before are done. Raises: as `train`.

        Args: folder on the nodes of the trainer.
        """
        await self._call(self._actor.save.remote(os.path.abspath(os.path.expanduser(folder))))

    async def metrics(self, after: int = 0) -> AsyncIterator[Metrics]:
        """The metrics of each finished job, as it finishes, without end; first those of jobs after number `after`.

        `service/job` is the number. Raises: ServiceBroken when the service has ended or can train no more.
        """
        while True:
            after, records = await self._call(self._actor.metrics_after.remote(after, POLL_S))
            for record in records:
                yield record

    @property
    def openai_base_url(self) -> str:
        """Of the first engine. Raises: as `openai_base_urls`."""
        return self.openai_base_urls[0]

    @property
    def openai_base_urls(self) -> tuple[str, ...]:
        """Of all engines that are up, for clients that spread their requests. One that replaces a lost one may have
        another.

        Raises: ValueError if the configuration has none, ConnectionError while no engine is up, ServiceBroken if none
            will be any more.
        """
        self._look()
        if not self._state.has_endpoint:
            raise ValueError("the service's engines have no HTTP endpoint: set generator.enable_http_endpoint=true")
        if not self._state.urls and self._state.broken is not None:
            raise ServiceBroken(f"no engine of the service is up, and it can no longer train: {self._state.broken}")
        if not self._state.urls:
            raise ConnectionError("no engine of the service is up: lost ones are being replaced, ask again in a minute")
        return tuple(f"{url}/v1" for url in self._state.urls)

    @property
    def model_name(self) -> str:
        """NAME over HTTP: the newest weights. `NAME@VERSION` is let in while this version is served, else it is an
        error; an answer's `policy_versions` say what drew it (docs/serving.md)."""
        return self._state.model_name

    @property
    def policy_version(self) -> int:
        """Of the weights that the engines serve now."""
        self._look()
        return self._state.policy_version

    @property
    def broken(self) -> str | None:
        """Why it can train no more; None while it can. Its engines may still serve the last version.

        Raises: ServiceBroken if it has ended, TimeoutError if its process does not answer.
        """
        self._look()
        return self._state.broken

    @property
    def run_dir(self) -> str:
        """Its metrics.jsonl and logs, on the service's node."""
        return self._state.run_dir

    def stop(self) -> None:
        """End the service, all its processes, and the local Ray if `start` started one. Nothing to do a second time.

        Raises: ServiceBroken if its process has ended already or had to be killed; what `start` started has ended all
            the same.
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

    def _look(self) -> None:
        """Raises: ServiceBroken if it has ended, TimeoutError if its process is stopped or too busy to answer."""
        self._state = _answer(self._actor.state.remote(), ANSWER_S)

    @property
    def _actor(self) -> Any:
        """Raises: ServiceBroken after `stop`: a call would have Ray, which may have ended with it, start a cluster."""
        if self._is_stopped:
            raise ServiceBroken("this program has stopped the service")
        return self._handle

    async def _call(self, ref: Any) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except (RayTaskError, RayActorError) as error:
            raise _plain(error) from None


def listed(given: Any, depth: int) -> Any:
    """Iterables, and those in them, as lists that can travel; what is none the service refuses in its own words."""
    if depth == 0 or isinstance(given, str | bytes | Mapping | ChatSample | TokenSample):
        return given
    if not isinstance(given, Iterable):
        return given
    return [listed(one, depth - 1) for one in given]


def _answer(ref: Any, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"the service's process did not answer within {timeout_s:g} s") from None
    except (RayTaskError, RayActorError) as error:
        raise _plain(error) from None


def _plain(error: Exception) -> Exception:
    """The service's own error, without Ray around it."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return ServiceBroken(f"the service's process has ended: {error}")


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _place(name: str) -> Any:
    here = ray.get_runtime_context().get_node_id()
    return ray.remote(ServiceActor).options(  # type: ignore[attr-defined]
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=MAX_CONCURRENCY,
        runtime_env={"env_vars": worker_environment()},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
    )


def _named_variables(config: Config) -> dict[str, str]:
    """Variables of this program's environment that the service reads: it may live on another node."""
    name = config.generator.remote_api_key_env
    return {} if name is None else {name: os.environ[name]}


def _joined() -> Cluster:
    """The cluster that this program has joined by itself."""
    return Cluster(
        address=str(ray.get_runtime_context().gcs_address),
        is_local=False,
        has_gpus=ray.cluster_resources().get("GPU", 0) > 0,
    )
