"""The place of one engine, its process, and how that is ended when it no longer answers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import host, log_to, talk_through_node_address, use_devices
from skyrl_train.hub import local_folder
from skyrl_train.inference.engine import Engine
from skyrl_train.inference.remote import RemoteEngine
from skyrl_train.inference.settings import EngineSettings, RemoteEngineSettings

# Requests in flight come as a handful of batches; the rest are control calls that must never queue behind them.
MAX_CONCURRENCY = 1000
GONE_S = 10.0
"""Patience with killed processes until the system has taken them away."""


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has loaded its model."""

    num_workers: int
    url: str | None
    """Of the HTTP endpoint that it offers, if any."""
    node_id: str
    pids: tuple[tuple[int, float], ...]
    """(process id, time of its creation) of its processes; no other process has both."""


def _started(num_workers: int, url: str | None = None) -> Started:
    this = psutil.Process()
    pids = tuple((process.pid, process.create_time()) for process in (this, *this.children(recursive=True)))
    return Started(num_workers, url, ray.get_runtime_context().get_node_id(), pids)


class EngineActor(Engine):
    """An Engine whose process writes its own log file.

    It is built by `start`: of an error in an actor's constructor Ray keeps no more than the text of a stack.
    """

    def __init__(self, log_path: str, visible_devices: str | None) -> None:
        use_devices(visible_devices)
        log_to(log_path)
        talk_through_node_address()

    async def start(self, settings: EngineSettings) -> Started:
        """A hub model is downloaded to this node first."""
        http = settings.http and replace(settings.http, advertised_host=host())
        super().__init__(replace(settings, model_path=local_folder(settings.model_path), http=http))
        num_workers = (await self.ready())["num_workers"]
        return _started(num_workers, None if http is None else await self.start_server())


class RemoteEngineActor(RemoteEngine):
    """As EngineActor, for a server that runs already; it needs no GPU and next to no CPU."""

    def __init__(self, log_path: str, visible_devices: str | None) -> None:
        log_to(log_path)

    async def start(self, settings: RemoteEngineSettings) -> Started:
        super().__init__(replace(settings, model_path=local_folder(settings.model_path)))
        return _started((await self.ready())["num_workers"])


def kill_processes(pids: tuple[tuple[int, float], ...]) -> None:
    """Kill what is left of them. A stopped process obeys nothing else, and Ray's own way is to ask."""
    found = []
    for pid, created in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, GONE_S)


def kill_on_node(engine: Started) -> ray.ObjectRef[None]:
    """`kill_processes` on the engine's node."""
    strategy = NodeAffinitySchedulingStrategy(engine.node_id, soft=False)
    task = ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    return task.remote(engine.pids)


@dataclass(slots=True)
class EnginePlace:
    """Where an engine runs, and another one after it is lost."""

    name: str
    slot: Slot
    settings: EngineSettings | RemoteEngineSettings
    log_path: str
    visible_devices: str | None = None
    """None: those that Ray gives it."""
    actor: Any = field(init=False)
    started: Started | None = None
    """None until the engine has loaded its model."""
    is_up: bool = True
    """The engine is called and sent weights; False from its loss until a replacement has started."""
    lost_because: str = ""
    restarts: int = 0
    """Replacements since an engine in this place last served."""
    replacement: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.new_actor()

    def new_actor(self) -> None:
        """Asks Ray for a process and returns at once."""
        self.actor = (
            ray.remote(RemoteEngineActor if isinstance(self.settings, RemoteEngineSettings) else EngineActor)
            .options(  # type: ignore[attr-defined]
                num_cpus=self.slot.num_cpus,
                num_gpus=self.slot.num_gpus,
                scheduling_strategy=self.slot.strategy,
                max_concurrency=MAX_CONCURRENCY,
            )
            .remote(self.log_path, self.visible_devices)
        )

    async def end(self) -> None:
        """Kill the engine, also where it is stopped, and what it started: they hold the memory of its devices."""
        started, self.started = self.started, None
        ray.kill(self.actor)
        if started is not None:
            with contextlib.suppress(RayError, TimeoutError):  # its node may be lost as well
                await asyncio.wait_for(asyncio.wrap_future(kill_on_node(started).future()), 2 * GONE_S)
