"""The process of one engine, and how it is ended when it no longer answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.process import host, log_to, talk_through_node_address, use_devices
from skyrl_train.engines.remote.engine import RemoteEngine
from skyrl_train.engines.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.engines.vllm.engine import Engine, import_vllm
from skyrl_train.engines.vllm.root_cause import root_cause
from skyrl_train.engines.vllm.scratch import scratch
from skyrl_train.hf.hub import local_folder

GONE_S = 10.0
"""Patience with killed processes until the system has taken them away."""
TRACKER_S = 3.0
"""Patience with a resource tracker that has work to do: a hundredth of it, on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has loaded its model."""

    num_workers: int
    url: str | None
    """Of the HTTP endpoint that it offers, if any."""
    node_id: str
    pids: tuple[tuple[int, float], ...]
    """(process id, time of its creation) of its processes; no other process has both."""
    scratch: str | None = None
    """Folder with the temporary files of its processes."""


def _started(num_workers: int, url: str | None = None, folder: str | None = None) -> Started:
    this = psutil.Process()
    pids = tuple((process.pid, process.create_time()) for process in (this, *this.children(recursive=True)))
    return Started(num_workers, url, ray.get_runtime_context().get_node_id(), pids, folder)


class EngineActor(Engine):
    """An Engine whose process writes its own log file.

    It is built by `start`: of an error in an actor's constructor Ray keeps no more than the text of a stack.
    """

    def __init__(self, log_path: str, visible_devices: str | None) -> None:
        self._log = Path(log_path)
        use_devices(visible_devices)
        log_to(log_path)
        talk_through_node_address()

    async def prepare(self, settings: EngineSettings) -> None:
        """What `start` does before it needs the device: a hub model is downloaded to this node, vLLM imported."""
        import_vllm(replace(settings, model_path=local_folder(settings.model_path)))

    async def start(self, settings: EngineSettings, *, waits_for_weights: bool = False) -> Started:
        """A hub model is downloaded to this node first.

        Args: waits_for_weights: answer nobody before the first weight sync, for others serve newer weights.
        Raises: RuntimeError with what vLLM's processes raised, if one did; ValueError for settings that contradict.
        """
        http = settings.http and replace(settings.http, advertised_host=host())
        begun = self._log.stat().st_size
        try:
            super().__init__(replace(settings, model_path=local_folder(settings.model_path), http=http))
        except RuntimeError as error:
            written = self._log.read_bytes()[begun:].decode(errors="replace")
            if cause := root_cause(written):
                raise RuntimeError(f"vLLM could not start: {cause}") from error
            raise
        num_workers = (await self.ready())["num_workers"]
        if waits_for_weights:
            await self.pause()
        url = None if http is None else await self.start_server()
        return _started(num_workers, url, str(scratch().path))


class RemoteEngineActor(RemoteEngine):
    """As EngineActor, for a server that runs already; it needs no GPU and next to no CPU."""

    def __init__(self, log_path: str, visible_devices: str | None) -> None:
        log_to(log_path)

    async def prepare(self, settings: RemoteEngineSettings) -> None:
        """The model's tokenizer is downloaded to this node."""
        local_folder(settings.model_path)

    async def start(self, settings: RemoteEngineSettings, *, waits_for_weights: bool = False) -> Started:
        """What the server answers before the first weight sync is its own matter."""
        super().__init__(replace(settings, model_path=local_folder(settings.model_path)))
        return _started((await self.ready())["num_workers"])


def kill_processes(pids: tuple[tuple[int, float], ...], folder: str | None = None) -> None:
    """Kill what is left of them, and remove their temporary folder.

    A stopped process obeys nothing else, and Ray only asks it.

    One of them, multiprocessing's resource tracker, ends when the others have, and removes what they leave in /dev/shm.
    """
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for pid, created in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                (trackers if "resource_tracker" in " ".join(process.cmdline()) else others).append(process)
    _kill(others)
    _, stuck = psutil.wait_procs(trackers, TRACKER_S)
    _kill(stuck)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GONE_S)


async def kill_on_node(engine: Started) -> None:
    """`kill_processes` on the engine's node. Raises: RayError if that is another, and lost."""
    if engine.node_id == ray.get_runtime_context().get_node_id():  # a task would start a process of 2 s for it
        await asyncio.to_thread(kill_processes, engine.pids, engine.scratch)
        return
    strategy = NodeAffinitySchedulingStrategy(engine.node_id, soft=False)
    task = ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    await asyncio.wrap_future(task.remote(engine.pids, engine.scratch).future())
