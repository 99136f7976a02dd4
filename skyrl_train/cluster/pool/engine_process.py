"""The process of one engine, and how it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import ray

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.cluster.process import host, on_node
from skyrl_train.engines.protocol import EngineFacts, engine_kind
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import local_folder
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

GONE_S = 10.0
"""Seconds for killed processes to disappear."""
TRACKER_S = 10.0
"""Seconds for a resource tracker to finish; it needs a few hundredths of one on an idle machine, and more if it has
only just been started.
"""


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that has loaded its model."""

    facts: EngineFacts
    node_id: str
    pids: tuple[tuple[int, float], ...]
    """(process id, creation time) of its processes, which identifies them."""


class EngineProcess:
    """Builds an engine of any kind in `start`, and forwards other calls to it.

    Senders may call `update_weights` before `begin_weight_update` has ended: they fill their first buckets meanwhile.
    """

    def __init__(self, log_path: str) -> None:
        self._log = Path(log_path)
        self._engine: Any = None
        self._has_begun = asyncio.Event()
        self._refusal: Exception | None = None
        """Why the last update could not begin."""
        self._num_connections = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(self, settings: EngineSettings) -> None:
        """The part of `start` that needs no device: imports of libraries."""
        settings = _on_this_node(settings)
        import_modules(settings.custom_modules)
        prepare = getattr(resolve_name(engine_kind(settings.generator).engine), "prepare", None)
        if prepare is not None:
            prepare(settings)

    async def start(self, settings: EngineSettings, *, waits_for_weights: bool = False) -> StartedEngine:
        """Start the engine with a model of this node.

        Args: waits_for_weights: stay paused until the first weight sync, because other engines serve newer weights.
        Raises: RuntimeError with the error of the engine's process that failed first; ValueError for invalid settings.
        """
        import_modules(settings.custom_modules)
        engine = resolve_name(engine_kind(settings.generator).engine)
        log_start = self._log.stat().st_size
        try:
            self._engine = engine(_on_this_node(settings))
        except RuntimeError as error:
            written = self._log.read_bytes()[log_start:].decode(errors="replace")
            find = getattr(engine, "cause_of_death", None)
            if find is not None and (cause := find(written)):
                raise RuntimeError(f"the engine could not start: {cause}") from error
            raise
        facts = await self._engine.start(waits_for_weights=waits_for_weights)
        this = psutil.Process()
        pids = tuple((process.pid, process.create_time()) for process in (this, *this.children(recursive=True)))
        return StartedEngine(facts, ray.get_runtime_context().get_node_id(), pids)

    async def shutdown(self) -> None:
        if self._engine is not None:  # else it could not be built, and its log shall end with the reason
            await self._engine.shutdown()

    async def begin_weight_update(self) -> None:
        self._refusal = None
        try:
            await self._engine.begin_weight_update()
        except Exception as error:
            self._refusal = error
            raise
        finally:
            self._has_begun.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        self._num_connections += 1
        await self._engine.init_weight_sync(info)

    async def update_weights(self, message: ControlMessage) -> None:
        number = self._num_connections
        await self._has_begun.wait()
        if number != self._num_connections:  # it would take the weights of the new sender
            raise WeightSyncError("another sender has connected while this one waited for the weight update to begin")
        if self._refusal is not None:
            raise WeightSyncError(f"the weight update could not begin: {self._refusal}") from self._refusal
        await self._engine.update_weights(message)

    async def finish_and_resume(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """`finish_weight_update` and `resume` of the engine, in one call."""
        self._has_begun.clear()
        await self._engine.finish_weight_update(policy_version, sent_digests)
        await self._engine.resume()


def _on_this_node(settings: EngineSettings) -> EngineSettings:
    try:
        folder = local_folder(settings.model_path)
    except ValueError:
        if settings.model_path.startswith("/"):
            raise
        # An engine whose node died is started again on one that may not have the model of the hub.
        download(settings.model_key, settings.model_path, settings.rpc_timeout_s, "trainer.timeout_s")
        folder = local_folder(settings.model_path)
    return replace(settings, model_path=folder, advertised_host=host())


def kill_processes(pids: tuple[tuple[int, float], ...], folder: str | None = None) -> None:
    """Kill the processes that are left (a stopped process ignores Ray's request), and remove their temporary folder.
    Multiprocessing's resource tracker ends after the others, and removes what they leave in /dev/shm. A process that
    is just starting has no command line for a moment: it may be a tracker, and is given the same time to end.
    """
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for pid, created in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                command = " ".join(process.cmdline())
                (trackers if not command or "resource_tracker" in command else others).append(process)
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


async def kill_on_node(engine: StartedEngine) -> None:
    """`kill_processes` on the engine's node. Raises: RayError if that is another, and dead."""
    await on_node(engine.node_id, kill_processes, engine.pids, engine.facts.scratch)
