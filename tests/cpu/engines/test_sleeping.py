"""What sleeping engines must keep, and what becomes of one that cannot wake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.engines.settings import engine_arguments
from skyrl_train.engines.vllm.core import Core
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.engines.vllm.weights import Weights
from skyrl_train.engines.vllm.worker.sleeping import Unsynced, plain_tensors
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.settings import MIB, engine_settings

SETTINGS = engine_settings("model", "tiny", "float32", 128, kv_cache_memory_gb=MIB, enable_sleep_mode=True)


class Layer(nn.Module):
    """Tensors in all the places where vLLM's layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("table", torch.ones(3))
        self.view_of_weight = self.weight.data[1:]
        self.scale = torch.full((2, 3), 7.0)
        self.part_of_scale = self.scale[1]
        self.impl = SimpleNamespace(slopes=torch.arange(4), kv_cache=torch.ones(9), name="flash")
        self.kv_cache = torch.ones(100)


def test_only_tensors_that_nobody_else_brings_back_are_kept():
    layer = Layer()
    kept = plain_tensors(nn.Sequential(layer, layer))
    assert sorted(tensor.numel() for tensor in kept) == [4, 6]
    unsynced = Unsynced(layer)
    for tensor in (layer.scale, layer.impl.slopes, layer.weight.data, layer.kv_cache):
        tensor.fill_(-1)
    unsynced.restore()
    assert layer.part_of_scale.tolist() == [7, 7, 7] and layer.scale.eq(7).all()
    assert layer.impl.slopes.tolist() == [0, 1, 2, 3]
    assert layer.weight.eq(-1).all() and layer.kv_cache.eq(-1).all()


def test_sleep_mode_is_asked_for_only_where_vllm_has_it():
    assert engine_arguments(SETTINGS, "cuda")["enable_sleep_mode"] is True
    assert engine_arguments(SETTINGS, "cpu")["enable_sleep_mode"] is False


class FrozenCore:
    """Stands for vLLM's core with requests in flight, as far as it falls asleep and wakes (0.26 to 0.32)."""

    errored = False

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.is_whole, self.frozen, self.is_paused = True, 3, False
        self.engine_core = self

    async def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep" and not self.asleep, "it would unmap a second time what sleeps"
        self.asleep, self.is_paused = {"weights", "kv_cache"}, True
        self.is_whole &= level == 1

    async def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)
        if not self.asleep:
            self._resume()

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True
        self.frozen = 0 if mode == "abort" else self.frozen

    async def resume_generation(self) -> None:
        self._resume()

    def _resume(self) -> None:
        assert self.is_whole or not self.frozen, "a step over half a model"
        self.is_paused = False

    async def start_weight_update(self) -> None:
        self.is_whole = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        assert method in ("skyrl_keep_unsynced", "skyrl_restore_unsynced", "skyrl_close_update")


def engine_of(llm: Any) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._settings, engine._core = SETTINGS, Core(llm, SETTINGS.generator.weight_sync_timeout_s)
    engine._weights = Weights(engine._core, SETTINGS.served_model_name, None)
    engine._asleep = set()
    engine._running = asyncio.Event()
    engine._server = None
    engine._requests = engine._versions = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    return engine


def test_an_engine_whose_update_failed_sleeps_again_and_samples_nothing():
    core = FrozenCore()

    async def main() -> None:
        engine = engine_of(core)
        await engine.sleep()
        await engine.wake_weights()
        await engine.begin_weight_update()
        await engine.sleep()
        assert core.asleep == {"weights", "kv_cache"} and core.is_paused
        with pytest.raises(WeightSyncError):
            await engine.resume()
        await engine.wake_weights()
        await engine.begin_weight_update()

    asyncio.run(main())


def test_a_pause_that_fails_is_the_error_of_an_update_and_nothing_goes_on_behind_it():
    class Unpausable(FrozenCore):
        async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
            raise RuntimeError("the caches could not be reset")

        async def start_weight_update(self) -> None:
            await asyncio.sleep(0.05)
            await super().start_weight_update()
            raise RuntimeError("and so the update could not begin")

    core = Unpausable()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="the caches could not be reset"):
            await engine_of(core).begin_weight_update()
        assert not core.is_whole, "the other call has ended"

    asyncio.run(main())


def test_a_whole_engine_keeps_its_frozen_requests_when_it_sleeps_before_its_kv_cache_was_awake():
    core = FrozenCore()

    async def main() -> None:
        engine = engine_of(core)
        await engine.sleep(keep_weights=True)
        await engine.wake_weights()
        await engine.sleep(keep_weights=True)
        assert core.asleep == {"weights", "kv_cache"} and core.frozen == 3

    asyncio.run(main())


class Sleeper:
    """Stands for vLLM on a device that has become too full."""

    errored = False

    def __init__(self) -> None:
        self.ended = False

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "keep")

    async def wake_up(self, tags: list[str]) -> None:
        raise RuntimeError(f"CUDA out of memory for {tags}")

    def shutdown(self) -> None:
        self.ended = True


def test_an_engine_that_cannot_wake_ends_and_frees_its_memory():
    """vLLM would map what it has mapped again if it was asked again (vllm#34600)."""
    llm: Any = Sleeper()

    async def main() -> None:
        engine = engine_of(llm)
        await engine.sleep(keep_weights=True)
        with pytest.raises(EngineDeadError, match=r"weights: CUDA out of memory.*gpu_memory_utilization"):
            await engine.wake_weights()
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.start(waits_for_weights=False)

    asyncio.run(main())
    assert llm.ended
