"""What the process of one engine does, and how it is ended when it no longer answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.cluster.process import host
from skyrl_train.engines.protocol import EngineFacts, engine_kind
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.hf.hub import local_folder
from skyrl_train.imports import attribute

GONE_S = 10.0
"""Patience with killed processes until the system has taken them away."""
TRACKER_S = 3.0
"""Patience with a resource tracker that has work to do: a hundredth of it, on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process whose engine has loaded its model."""

    facts: EngineFacts
    node_id: str
    pids: tuple[tuple[int, float], ...]
    """(process id, time of its creation) of its processes; no other process has both."""


class EngineProcess:
    """Makes an engine of any kind in `start`, and hands other calls on to it."""

    def __init__(self, log_path: str) -> None:
        self._log = Path(log_path)
        self._engine: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(self, settings: EngineSettings) -> None:
        """What `start` does before it needs the device: a hub model is downloaded to this node, libraries imported."""
        settings = _on_this_node(settings)
        import_modules(settings.custom_modules)
        prepare = getattr(attribute(engine_kind(settings.generator).engine), "prepare", None)
        if prepare is not None:
            prepare(settings)

    async def start(self, settings: EngineSettings, *, waits_for_weights: bool = False) -> Started:
        """A hub model is downloaded to this node first.

        Args: waits_for_weights: answer nobody before the first weight sync, for others serve newer weights.
        Raises: RuntimeError with what the engine's processes raised, if one did; ValueError for settings that
            contradict.
        """
        import_modules(settings.custom_modules)
        engine = attribute(engine_kind(settings.generator).engine)
        begun = self._log.stat().st_size
        try:
            self._engine = engine(_on_this_node(settings))
        except RuntimeError as error:
            written = self._log.read_bytes()[begun:].decode(errors="replace")
            find = getattr(engine, "cause_of_death", None)
            if find is not None and (cause := find(written)):
                raise RuntimeError(f"the engine could not start: {cause}") from error
            raise
        facts = await self._engine.start(waits_for_weights=waits_for_weights)
        this = psutil.Process()
        pids = tuple((process.pid, process.create_time()) for process in (this, *this.children(recursive=True)))
        return Started(facts, ray.get_runtime_context().get_node_id(), pids)


def _on_this_node(settings: EngineSettings) -> EngineSettings:
    return replace(settings, model_path=local_folder(settings.model_path), advertised_host=host())


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
        await asyncio.to_thread(kill_processes, engine.pids, engine.facts.scratch)
        return
    strategy = NodeAffinitySchedulingStrategy(engine.node_id, soft=False)
    task = ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    await asyncio.wrap_future(task.remote(engine.pids, engine.facts.scratch).future())
