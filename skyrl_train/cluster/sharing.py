"""Whether engines and trainers share devices, and all that a start depends on it: the one place that asks
`trainer.placement.colocate_all`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from skyrl_train.cluster.placement import Demand, Placement, Slot, terms
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.release import KeepResident, Release, build_release
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.config import Config
from skyrl_train.engines.settings import Margin
from skyrl_train.ranks import WEIGHTS

if TYPE_CHECKING:
    from skyrl_train.cluster.pool.pool import EnginePool
    from skyrl_train.cluster.ranks.policy_group import PolicyGroup
    from skyrl_train.cluster.weight_sync import WeightSync

LEFT_BY_TRAINER = 2 << 30
"""Bytes that an offloaded trainer comes to hold after the engine has started, for NCCL, kernels and what stays of
torch's pages. All that a rank of a pipeline holds is 1.0 GiB of an H200; ranks of tensor parallelism, for which it was
not read, have one more communicator, of as many channels as NCCL takes."""
SHARE_OF_STAYING_TRAINERS = 0.5
"""Of what is free before their first step, for moments of Adam and whatever torch keeps of a step's memory."""

Starts = Sequence[tuple[ModelGroup, Callable[[], Awaitable[None]]]]
"""Trainers, and what has each load its model."""


class Sharing(Protocol):
    """Who has which devices, and what follows from it."""

    is_shared: bool
    max_engine_restarts: int

    @property
    def release(self) -> Release:
        """What trainers do out of their turn."""

    async def reserve(self, demands: list[Demand], use_gpus: bool) -> Placement:
        """Raises: PlacementError if the cluster has no room."""

    async def visible_devices(self, policy: WorkerGroup, slots: Sequence[Slot]) -> list[str | None]:
        """CUDA_VISIBLE_DEVICES of processes in these slots; None where Ray says it."""

    async def start(self, engines: EnginePool, trainers: Starts) -> None:
        """Have all load their models."""

    async def send_first_weights(self, policy: PolicyGroup, engines: EnginePool, weight_sync: WeightSync) -> None:
        """To engines that have just started, of which nobody has asked anything."""

    def engine_margin(self, scored_tokens: int) -> Margin:
        """What engines leave of the memory that they find. Args: of the longest sample that they score."""

    @property
    def cached_sequences(self) -> int | None:
        """What of an engine's KV cache is worth its memory; None for all that fits."""


class OwnDevices:
    """Every process has devices, or without GPUs memory, of its own."""

    is_shared = False

    def __init__(self, config: Config) -> None:
        self._config, self.release = config, KeepResident()
        self.max_engine_restarts = config.generator.max_engine_restarts
        self.cached_sequences: int | None = None

    async def reserve(self, demands: list[Demand], use_gpus: bool) -> Placement:
        return await Placement.reserve(demands, **terms(self._config.trainer.placement, use_gpus))

    async def visible_devices(self, policy: WorkerGroup, slots: Sequence[Slot]) -> list[str | None]:
        return [None] * len(slots)

    async def start(self, engines: EnginePool, trainers: Starts) -> None:
        """Side by side."""
        await asyncio.gather(engines.start(), *(start() for _, start in trainers))

    async def send_first_weights(self, policy: PolicyGroup, engines: EnginePool, weight_sync: WeightSync) -> None:
        await weight_sync.send_once()

    def engine_margin(self, scored_tokens: int) -> Margin:
        return Margin(scored_tokens=scored_tokens)


class SharedDevices:
    """Trainers and engines take turns on the policy's devices."""

    is_shared = True
    max_engine_restarts = 0
    """A replacement starts when it is needed, and would find the devices that it shares in use."""

    def __init__(self, config: Config) -> None:
        self._config, self.release = config, build_release(config.trainer)

    async def reserve(self, demands: list[Demand], use_gpus: bool) -> Placement:
        return await Placement.reserve_shared(demands, **terms(self._config.trainer.placement, use_gpus))

    async def visible_devices(self, policy: WorkerGroup, slots: Sequence[Slot]) -> list[str | None]:
        if not slots or not slots[0].uses_gpus:
            return [None] * len(slots)
        devices = await policy.visible_devices()
        return [",".join(devices[rank] for rank in slot.shares) for slot in slots]

    async def start(self, engines: EnginePool, trainers: Starts) -> None:
        """One after the other, and each leaves the devices once it has loaded: an engine sizes itself by the memory
        that is free when it starts. Engines import vLLM meanwhile."""

        async def start_trainers() -> None:
            for group, start in trainers:
                await start()
                await self.release.leave(group)

        await asyncio.gather(engines.prepare(), start_trainers())
        await engines.start()

    async def send_first_weights(self, policy: PolicyGroup, engines: EnginePool, weight_sync: WeightSync) -> None:
        await engines.sleep()
        await self.release.enter(policy, WEIGHTS)
        await engines.wake_weights()
        await weight_sync.send_once()
        await self.release.leave(policy, WEIGHTS)
        await engines.wake_kv_cache()

    def engine_margin(self, scored_tokens: int) -> Margin:
        """Engines start when the trainers of their devices have left them for the first time, before their first
        step."""
        trainer, margin = self._config.trainer, Margin(scored_tokens=scored_tokens)
        if trainer.placement.release == "exit":
            return margin
        if trainer.placement.release == "none":
            return replace(margin, share=SHARE_OF_STAYING_TRAINERS)
        return replace(margin, for_trainers=LEFT_BY_TRAINER * (2 if trainer.starts_reference else 1))

    @property
    def cached_sequences(self) -> int | None:
        """An engine's part of a step's samples, and one prompt's more, for they are dealt by prompts. Of clients over
        HTTP nobody knows how many there are."""
        generator, trainer = self._config.generator, self._config.trainer
        if generator.enable_http_endpoint:
            return None
        samples = trainer.train_batch_size * generator.n_samples_per_prompt
        each = -(-samples // generator.num_inference_engines) + generator.n_samples_per_prompt
        # What waits for its environment keeps its cache; a sample of one turn that is not computed has none.
        return min(each, generator.max_num_seqs) if generator.max_turns == 1 else each


def build_sharing(config: Config) -> Sharing:
    return SharedDevices(config) if config.trainer.placement.colocate_all else OwnDevices(config)
