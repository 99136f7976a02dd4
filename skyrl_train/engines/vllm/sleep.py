"""How an engine frees its device and takes it again."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from skyrl_train.device import device_type
from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.weight_sync.control import WeightSyncError

if TYPE_CHECKING:
    from skyrl_train.engines.settings import EngineSettings
    from skyrl_train.engines.vllm.core import Core
    from skyrl_train.engines.vllm.weights import Weights

log = logging.getLogger(__name__)


class Sleeps(ABC):
    """The calls of `VllmEngine` that move its memory."""

    _core: Core
    _weights: Weights
    _settings: EngineSettings
    _running: asyncio.Event
    _paused: bool
    _asleep: set[str]
    """Of vLLM's tags "weights" and "kv_cache"."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the memory of the KV cache and of the weights, which come back from host memory or with an update.

        Running requests are frozen; they go on when the engine is awake. Those of an engine whose update broke off
        before its KV cache was awake are aborted.
        """
        if self._weights.are_adapters:
            keep_weights = True  # no update brings the base model
        if len(self._asleep) == 1:
            await self._wake_to_sleep()
        if self._asleep:
            return
        if device_type() == "cpu":
            log.warning("sleep only pauses this engine: vLLM's CPU platform keeps the memory")
        self._running.clear()
        self._paused = True
        if not keep_weights:
            await self._weights.drop()
        level = 1 if keep_weights else 2
        await self._core.call(self._core.llm.sleep(level, mode="keep"), "falling asleep")
        self._asleep = {"weights", "kv_cache"}

    async def wake_weights(self) -> None:
        """Memory for the weights again; of `sleep(keep_weights=True)` also their values. Nothing to do if awake.

        Raises: EngineDeadError where it fails, for lack of memory; the engine has then ended.
        """
        if "weights" in self._asleep:
            await self._wake("weights")
            await self._weights.restore()

    async def wake_kv_cache(self) -> None:
        """Generation goes on, also after a first attempt whose `resume` failed. Nothing to do if awake.

        Raises: WeightSyncError while the weights are not there; EngineDeadError as `wake_weights`.
        """
        if not self._weights.are_whole or "weights" in self._asleep:
            raise WeightSyncError("the engine's weights are asleep or were dropped: wake and update them first")
        if "kv_cache" in self._asleep:
            await self._wake("kv_cache")
        if self._paused:
            await self.resume()

    async def _wake_to_sleep(self) -> None:
        """vLLM (0.26) falls asleep only as a whole, and its scheduler goes on when the last memory wakes: over half a
        model, so there must be nothing to go on with."""
        if not self._weights.are_whole:
            await self._weights.close_broken()
            abort = self._core.llm.pause_generation(mode="abort", clear_cache=True)
            await self._core.call(abort, "aborting frozen requests")
        await self._wake("kv_cache")

    async def _wake(self, tag: str) -> None:
        try:
            await self._core.call(self._core.llm.wake_up([tag]), f"waking the {tag}")
        except Exception as error:
            # vLLM (0.26 to 0.32) may have mapped a part, which a second attempt would map again (vllm#34600).
            await self.shutdown()
            raise EngineDeadError(
                f"the engine could not take its memory again ({tag}: {error}) and has ended; set "
                "generator.gpu_memory_utilization to less than it was "
                f"({self._settings.generator.gpu_memory_utilization})"
            ) from error
        self._asleep.discard(tag)

    async def memory(self) -> list[dict[str, float]]:
        """What each worker holds, as `device.memory_in_use`.

        torch goes on counting what sleeps as reserved; here it is not.
        """
        workers = await self._core.ask_workers("skyrl_memory", "asking for its memory")
        return [
            held | {"reserved": held["reserved"] - sum(by_tag.get(tag, 0.0) for tag in self._asleep)}
            for held, by_tag in workers
        ]
