"""One vLLM engine: generates from token ids and receives new weights while it runs.

A plain class, used in a Ray actor or in any asyncio program. During a weight update the model is half loaded and a
single step would kill the core, so an engine whose update failed stays paused (`resume` refuses) until a complete
update has succeeded. An engine that shares its device: sleep -> wake_weights -> an update -> wake_kv_cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from skyrl_train.device import device_type
from skyrl_train.engines.protocol import EngineDeadError, EngineFacts
from skyrl_train.engines.settings import (
    EngineSettings,
    PauseMode,
    engine_arguments,
    seeds_requests,
    set_environment,
    still_running,
)
from skyrl_train.engines.vllm.core import Core
from skyrl_train.engines.vllm.core_start import prepare_core, quick_core_start
from skyrl_train.engines.vllm.memory import with_memory_sizes
from skyrl_train.engines.vllm.root_cause import root_cause
from skyrl_train.engines.vllm.scratch import scratch
from skyrl_train.imports import quick_imports
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

if TYPE_CHECKING:
    from skyrl_train.engines.vllm.http.server import HttpServer
    from skyrl_train.engines.vllm.requests import Requests

log = logging.getLogger(__name__)


def import_vllm(settings: EngineSettings) -> None:
    """Import vLLM, which takes longest of what needs no device. vLLM reads the environment when it is imported, so
    engines of different settings need different processes.
    """
    set_environment(settings, device_type())
    if device_type() == "cuda":  # a CPU's cores are busy, and vLLM preloads libraries into its core
        prepare_core()
    with quick_imports():
        from skyrl_train.engines.vllm import (
            requests,  # noqa: F401
        )


class VllmEngine:
    """Takes about 15 s to construct without a GPU: imports, one more process, loading."""

    prepare = staticmethod(import_vllm)
    cause_of_death = staticmethod(root_cause)

    def __init__(self, settings: EngineSettings) -> None:
        settings = with_memory_sizes(settings, device_type())
        self._settings = settings
        import_vllm(settings)
        scratch().enter()
        try:
            self._build(settings)
        except BaseException:
            scratch().leave()
            raise

    def _build(self, settings: EngineSettings) -> None:
        arguments = engine_arguments(settings, device_type())
        print(f"enforce_eager: {arguments['enforce_eager']}", flush=True)
        from skyrl_train.engines.vllm.compat import build_async_llm
        from skyrl_train.engines.vllm.requests import Requests
        from skyrl_train.engines.vllm.versions import VersionTracker
        from skyrl_train.engines.vllm.weights import Weights

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
            self._core.llm, self._versions, settings.max_model_len, has_seeds=seeds_requests(settings, device_type())
        )
        self._server: HttpServer | None = None
        self._asleep: set[str] = set()
        """vLLM's tags "weights" and "kv_cache"."""
        self._running = asyncio.Event()
        self._running.set()

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """Like `Engine.start`; binds the first adapter and opens the HTTP endpoint if the settings ask for them.

        Raises: EngineDeadError; WeightSyncError if the engine cannot hold the adapter; ValueError if the endpoint
            cannot listen on its address.
        """
        self._core.check_alive()
        if self._weights.are_adapters:
            await self._weights.bind_adapter(self._versions.policy_version, first=True)
        if waits_for_weights:
            await self.pause()
        url = None
        if self._settings.generator.enable_http_endpoint:
            from skyrl_train.engines.vllm.http.server import HttpServer

            self._server = HttpServer(self._settings, self._core.llm, self._versions, self._until_running)
            url = await self._server.start(self._versions.policy_version)
        return EngineFacts(self._settings.tensor_parallel_size, url, str(scratch().path))

    async def ping(self, timeout_s: float) -> None:
        await self._core.wait(self._core.llm.collective_rpc("skyrl_ping"), "health check", timeout_s)

    async def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Like `Engine.generate_batch`; batches may overlap. Raises: EngineDeadError; ValueError for a prompt without
        room to answer.
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
        scores = self._requests.prompt_logprobs(prompts)
        return await self._core.call(scores, "scoring prompts", self._settings.rpc_timeout_s)

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Like `Engine.pause`. Raises: TimeoutError with the requests that have not ended in the mode "wait"."""
        chosen: str = mode or self._settings.generator.pause_mode
        self._running.clear()
        pause = self._core.pause(chosen)
        if chosen != "wait":
            await self._core.call(pause, "pausing")
            return
        try:
            await self._core.call(pause, "pausing", self._settings.rpc_timeout_s)
        except TimeoutError as error:
            requests = list(self._core.llm.output_processor.request_states)
            raise still_running(self._settings.rpc_timeout_s, requests) from error

    async def resume(self) -> None:
        """Like `Engine.resume`; while the engine is asleep, generation continues at `wake_kv_cache`."""
        if not self._weights.are_complete:
            raise WeightSyncError("the last weight update did not complete: the engine stays paused until one has")
        if self._asleep:
            return
        await self._core.call(self._core.llm.resume_generation(), "resuming")
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        await self._weights.connect(info)

    async def begin_weight_update(self) -> None:
        if "weights" in self._asleep:
            raise WeightSyncError("wake the engine's weights before a weight update: they have no memory")
        if self._settings.generator.pause_mode == "wait":
            await self.pause()  # the core steps on until all requests have ended
            await self._weights.start()
            return
        # At once: the core takes them in this order, and each answer waits for this busy process.
        for result in await asyncio.gather(self.pause(), self._weights.start(), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def update_weights(self, message: ControlMessage) -> None:
        await self._weights.load(message)

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """Like `Engine.finish_weight_update`. Raises: WeightSyncError with the tensors that differ, are missing or
        unknown to the engine, or the incomplete layers; the engine then stays paused.
        """
        await self._weights.finish(policy_version, sent_digests)
        await self._versions.move_to(policy_version)
        if self._server is not None:
            self._server.move_to(policy_version)
        self._weights.are_complete = True

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Like `Engine.sleep`. Running requests are frozen and continue when the engine is awake; if the last update
        failed and the KV cache was not awake since, they are aborted.
        """
        if self._weights.are_adapters:
            keep_weights = True  # no update brings the base model
        if len(self._asleep) == 1:
            await self._wake_kv_cache_to_sleep()
        if self._asleep:
            return
        if device_type() == "cpu":
            log.warning("sleep only pauses this engine: vLLM's CPU platform keeps the memory")
        self._running.clear()
        if not keep_weights:
            await self._weights.drop()
        level = 1 if keep_weights else 2
        await self._core.call(self._core.llm.sleep(level, mode="keep"), "falling asleep")
        self._asleep = {"weights", "kv_cache"}

    async def _wake_kv_cache_to_sleep(self) -> None:
        """vLLM (0.26) can only sleep with all its memory awake, and its scheduler continues when the last part wakes:
        with incomplete weights, no request may be left to continue.
        """
        if not self._weights.are_complete:
            await self._weights.close_failed()
            await self._core.call(self._core.pause("abort"), "aborting frozen requests")
        await self._wake("kv_cache")

    async def wake_weights(self) -> None:
        """Like `Engine.wake_weights`. Raises: EngineDeadError for lack of memory; the engine has then ended."""
        if "weights" in self._asleep:
            await self._wake("weights")
            await self._weights.restore()

    async def wake_kv_cache(self) -> None:
        """Like `Engine.wake_kv_cache`; can be repeated if `resume` failed.
        Raises: WeightSyncError while the weights are incomplete; EngineDeadError like `wake_weights`.
        """
        if not self._weights.are_complete or "weights" in self._asleep:
            raise WeightSyncError("the engine's weights are asleep or were dropped: wake and update them first")
        if "kv_cache" in self._asleep:
            await self._wake("kv_cache")
        if not self._running.is_set():
            await self.resume()

    async def _wake(self, tag: str) -> None:
        try:
            await self._core.call(self._core.llm.wake_up([tag]), f"waking the {tag}")
        except Exception as error:
            # vLLM (0.26 to 0.32) may have mapped a part, which a second attempt would map again (vllm#34600).
            await self.shutdown()
            raise EngineDeadError(
                f"the engine could not map its memory again ({tag}: {error}) and was shut down; set "
                "generator.gpu_memory_utilization to less than it was "
                f"({self._settings.generator.gpu_memory_utilization})"
            ) from error
        self._asleep.discard(tag)

    async def memory(self) -> list[dict[str, float]]:
        """Like `Engine.memory`. torch counts sleeping memory as reserved; this does not."""
        workers = await self._core.ask_workers("skyrl_memory", "asking for its memory")
        return [
            held | {"reserved": held["reserved"] - sum(by_tag.get(tag, 0.0) for tag in self._asleep)}
            for held, by_tag in workers
        ]

    async def shutdown(self) -> None:
        """End the HTTP endpoint and the engine's processes; takes up to 5 s."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        held = [self._core.release()]
        if held[0] is not None:
            self._running.clear()
            self._requests.close()
            self._versions.close()
            from skyrl_train.engines.vllm.compat import shut_down

            # In a list: a thread may keep its arguments for a while after it has returned.
            await asyncio.to_thread(lambda: shut_down(held.pop(), self._settings.tensor_parallel_size))
            scratch().leave()

    async def _until_running(self) -> None:
        """Raises: TimeoutError if a pause takes longer than a call may; EngineDeadError."""
        self._core.check_alive()
        if not self._running.is_set():
            await self._core.wait(
                self._running.wait(), "waiting for the engine to resume", self._settings.rpc_timeout_s
            )
