"""One vLLM engine: generates from token ids and takes new weights while it runs.

A plain class; it lives in a Ray actor, or in any asyncio program. Order of a weight update:

    pause -> start_weight_update -> update_weights ... -> finish_weight_update -> resume

From start to finish the model is half loaded and a single step would kill the core, so an engine whose update broke
off stays paused (`resume` refuses) until a whole update has gone through.

An engine that shares its device sleeps while others use it: sleep -> wake_weights -> an update -> wake_kv_cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.device import device_type
from skyrl_train.engines.protocol import EngineFacts
from skyrl_train.engines.settings import (
    EngineSettings,
    PauseMode,
    engine_arguments,
    seeds_requests,
    set_environment,
    still_running,
)
from skyrl_train.engines.sync_report import SyncReport
from skyrl_train.engines.vllm.core import Core
from skyrl_train.engines.vllm.core_start import quick_core_start
from skyrl_train.engines.vllm.memory import with_memory_sizes
from skyrl_train.engines.vllm.root_cause import root_cause
from skyrl_train.engines.vllm.scratch import scratch
from skyrl_train.engines.vllm.sleep import Sleeps
from skyrl_train.engines.vllm.weights import Weights
from skyrl_train.imports import quick_imports
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

if TYPE_CHECKING:
    from skyrl_train.engines.vllm.http.server import HttpServer
    from skyrl_train.engines.vllm.requests import Requests

log = logging.getLogger(__name__)


def import_vllm(settings: EngineSettings) -> None:
    """What takes an engine's process longest before it touches its device. vLLM and its threads read the environment
    when they are imported, so an engine of other settings needs another process."""
    set_environment(settings, device_type())
    with quick_imports():
        from skyrl_train.engines.vllm import (
            requests,  # noqa: F401
        )


class VllmEngine(Sleeps):
    """Takes about 15 s to construct without a GPU: imports, one more process, loading."""

    prepare = staticmethod(import_vllm)
    cause_of_death = staticmethod(root_cause)

    def __init__(self, settings: EngineSettings) -> None:
        settings = with_memory_sizes(settings, device_type())
        self._settings = settings
        import_vllm(settings)
        scratch().enter()
        try:
            self._start(settings)
        except BaseException:
            scratch().leave()
            raise

    def _start(self, settings: EngineSettings) -> None:
        arguments = engine_arguments(settings, device_type())
        print(f"enforce_eager: {arguments['enforce_eager']}", flush=True)
        from skyrl_train.engines.vllm.compat import build_async_llm
        from skyrl_train.engines.vllm.requests import Requests
        from skyrl_train.engines.vllm.versions import VersionTracker

        # Held by Core alone, in no local name: an import above leaves a traceback behind, and with it this frame.
        with quick_core_start():
            self._core = Core(build_async_llm(arguments), settings.generator.weight_sync_timeout_s)
        adapter = None
        if settings.lora is not None:
            from skyrl_train.engines.vllm.worker.adapter_slots import EveryRequest

            adapter = EveryRequest(self._core.llm)
        self._weights = Weights(self._core, settings.served_model_name, adapter)
        self._versions = VersionTracker(self._core.llm)
        self._requests: Requests = Requests(
            self._core.llm,
            self._versions,
            settings.max_model_len,
            has_seeds=seeds_requests(settings, device_type()),
        )
        self._server: HttpServer | None = None
        self._paused = False
        self._asleep: set[str] = set()
        """Of vLLM's tags "weights" and "kv_cache"."""
        self._running = asyncio.Event()
        self._running.set()

    async def ready(self) -> dict[str, Any]:
        """Returns how many workers there are, and the version; where adapters are served the first is bound.

        Raises: EngineDeadError; WeightSyncError if the engine cannot hold the adapter.
        """
        self._core.check_alive()
        if not self._weights.are_served:
            await self._weights.bind_adapter(self._versions.policy_version, first=True)
        return {"num_workers": self._settings.tensor_parallel_size, "policy_version": self._versions.policy_version}

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """As `Engine.start`; with the HTTP endpoint, if there is to be one. Raises: as `ready` and `start_server`."""
        num_workers = (await self.ready())["num_workers"]
        if waits_for_weights:
            await self.pause()
        url = await self.start_server() if self._settings.generator.enable_http_endpoint else None
        return EngineFacts(num_workers, url, str(scratch().path))

    async def start_server(self) -> str:
        """Offer the HTTP endpoint of the settings; returns its URL.

        Raises: ValueError if it cannot listen where it should.
        """
        from skyrl_train.engines.vllm.http.server import HttpServer

        self._server = HttpServer(self._settings, self._core.llm, self._versions, self._until_running)
        return await self._server.start(self._versions.policy_version)

    async def ping(self, timeout_s: float) -> None:
        """Returns when every worker has answered. Raises: EngineDeadError, TimeoutError."""
        await self._core.wait(self._core.llm.collective_rpc("skyrl_ping"), "being asked whether it lives", timeout_s)

    async def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Generate for many prompts at once; batches may overlap.

        Args: requests are (index, prompt token ids, parameters); the index only labels the result.
        Yields: lists of (index, generation) as they end. While the engine is paused nothing starts.
        Raises: EngineDeadError within a second of the core's death; ValueError for a prompt without room to answer.
        """
        await self._core.wait(self._running.wait(), "waiting for the engine to resume", None)
        stream = self._requests.generate(requests)
        try:
            while True:
                try:
                    finished = await self._core.wait(anext(stream), "generating", None)
                except StopAsyncIteration:
                    return
                yield [(index, self._requests.generation(ended)) for index, ended in finished]
        finally:
            await stream.aclose()

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Per prompt the logprob of each token given those before it, at temperature 1; 0 for the first token."""
        scores = self._requests.prompt_logprobs(prompts)
        return await self._core.call(scores, "scoring prompts", self._settings.rpc_timeout_s)

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Stop drawing tokens and forget every cached prefix. New requests wait until `resume`.

        Args: mode says what happens to running requests: "keep" freezes them (after `resume` they go on, with the
            new weights and the old tokens), "wait" lets them end, "abort" ends them with what they have; None means
            the mode of the settings.
        Raises: TimeoutError that names requests which "wait" has waited for in vain; the engine stays paused.
        """
        mode = self._settings.generator.pause_mode if mode is None else mode  # type: ignore[assignment]  # one of three
        self._running.clear()
        self._paused = True
        pause = self._core.llm.pause_generation(mode=mode, clear_cache=True)
        if mode != "wait":
            await self._core.call(pause, "pausing")
            return
        try:
            await self._core.call(pause, "pausing", self._settings.rpc_timeout_s)
        except TimeoutError as error:
            requests = list(self._core.llm.output_processor.request_states)
            raise still_running(self._settings.rpc_timeout_s, requests) from error

    async def resume(self) -> None:
        """Generation goes on, or does so when a sleeping KV cache is awake.

        Raises: WeightSyncError while the weights are not whole.
        """
        if not self._weights.are_whole:
            raise WeightSyncError("the last weight update did not complete: the engine stays paused until one has")
        if self._asleep:
            return
        await self._core.call(self._core.llm.resume_generation(), "resuming")
        self._paused = False
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        """Connect to the sender; for a broadcast this returns when everybody has joined.

        Args: info is the sender's `init_info` (plus `rank_offset` for a broadcast).
        """
        await self._weights.connect(info)

    async def begin_weight_update(self) -> None:
        """`pause` and `start_weight_update` in one call."""
        await self.pause()
        await self.start_weight_update()

    async def start_weight_update(self) -> None:
        """Raises: WeightSyncError unless paused. An update that broke off before is given up."""
        if "weights" in self._asleep:
            raise WeightSyncError("wake the engine's weights before a weight update: they have no memory")
        if not self._paused:
            raise WeightSyncError("pause the engine before a weight update: one step on half-loaded weights kills it")
        await self._weights.start()

    async def update_weights(self, message: ControlMessage) -> None:
        """Take in all that one sender sends; messages are worked off in the order in which they come."""
        await self._weights.take_in(message)

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> SyncReport:
        """Check that all of the sent weights have arrived and been loaded, and serve them as `policy_version`.

        Args: sent_digests are those of the sender's report.
        Raises: WeightSyncError naming the tensors that differ, are missing, are unknown to the engine, or the layers
            that got too little; the engine then stays paused.
        """
        report = await self._weights.finish(policy_version, sent_digests)
        self._versions.move_to(policy_version)
        if self._server is not None:
            self._server.move_to(policy_version)
        self._weights.are_whole = True
        return report

    async def stats(self) -> dict[str, float]:
        return {
            "policy_version": self._versions.policy_version,
            "paused": float(self._paused),
            "needs_weights": float(not self._weights.are_whole),
            "asleep": float(bool(self._asleep)),
            "requests_running": self._core.llm.get_num_unfinished_requests(),
            "tokens_generated": self._requests.tokens_generated,
        }

    async def shutdown(self) -> None:
        """Ends the HTTP endpoint and the engine's processes; takes up to 5 s."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        held = [self._core.release()]
        if held[0] is not None:
            self._running.clear()
            self._requests.close()
            self._versions.close()
            from skyrl_train.engines.vllm.compat import shut_down

            # In a list: a thread may keep its arguments for a while after its answer has come.
            await asyncio.to_thread(lambda: shut_down(held.pop(), self._settings.tensor_parallel_size))
            scratch().leave()

    async def _until_running(self) -> None:
        """Raises: TimeoutError if a pause takes longer than a call may; EngineDeadError."""
        self._core.check_alive()
        if not self._running.is_set():
            await self._core.wait(
                self._running.wait(), "waiting for the engine to resume", self._settings.rpc_timeout_s
            )
