"""Start-up decisions that depend on whether engines and trainers share devices; trainer/residency.py moves memory
between phases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_train.cluster.placement import Demand, Placement, Slot
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.config import Config
from skyrl_train.engines.settings import Margin
from skyrl_train.ranks import WEIGHTS

if TYPE_CHECKING:
    from skyrl_train.cluster.pool.pool import EnginePool
    from skyrl_train.cluster.ranks.policy_group import PolicyGroup
    from skyrl_train.cluster.weight_sync import WeightSync

LEFT_BY_TRAINER = 2 << 30
"""Bytes that an offloaded trainer comes to hold after the engine has started, for NCCL, kernels and the rest of
torch's pages. A rank of a pipeline holds 1.0 GiB of an H200 in all; ranks of tensor parallelism, not measured, have one
more communicator, with as many channels as NCCL takes."""
SHARE_OF_STAYING_TRAINERS = 0.5
"""Fraction of the memory that is free before their first step, for Adam's moments and torch's cache of a step."""

Starts = Sequence[tuple[ModelGroup, Callable[[], Awaitable[None]]]]
"""Trainers, and what has each load its model."""


class OwnDevices:
    """Dedicated devices, or without GPUs memory, for every process."""

    is_shared = False
    takes_turns = False
    """Whether trainers and engines free their memory for each other."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def max_engine_restarts(self) -> int:
        return self._config.generator.max_engine_restarts

    async def reserve(self, demands: list[Demand], use_gpus: bool) -> Placement:
        """Raises: PlacementError if the cluster has no room."""
        return await Placement.reserve(demands, self._config.trainer.placement, use_gpus=use_gpus)

    async def visible_devices(self, policy: WorkerGroup, slots: Sequence[Slot]) -> list[str | None]:
        """CUDA_VISIBLE_DEVICES of processes in these slots; None for Ray's choice."""
        return [None] * len(slots)

    async def start(self, engines: EnginePool, trainers: Starts) -> None:
        """Have all load their models, concurrently."""
        await asyncio.gather(engines.start(), *(start() for _, start in trainers))

    async def send_first_weights(self, policy: PolicyGroup, engines: EnginePool, weight_sync: WeightSync) -> None:
        """Send weights to engines that have just started and served no request."""
        await weight_sync.send_once()

    def engine_margin(self, scored_tokens: int) -> Margin:
        """Memory that engines leave free. Args: scored_tokens: of the longest sample that they score."""
        return Margin(scored_tokens=scored_tokens)

    @property
    def cached_sequences(self) -> int | None:
        """Number of sequences for which an engine's KV cache is worth its memory; None for all that fit."""
        return None


class SharedDevices(OwnDevices):
    """Trainers and engines compute on the policy's devices, one at a time, and all keep their memory."""

    is_shared = True

    @property
    def max_engine_restarts(self) -> int:
        """A replacement would start while the devices that it shares are in use."""
        return 0

    async def reserve(self, demands: list[Demand], use_gpus: bool) -> Placement:
        return await Placement.reserve_shared(demands, self._config.trainer.placement, use_gpus=use_gpus)

    async def visible_devices(self, policy: WorkerGroup, slots: Sequence[Slot]) -> list[str | None]:
        if not slots or not slots[0].uses_gpus:
            return [None] * len(slots)
        devices = await policy.visible_devices()
        return [",".join(devices[rank] for rank in slot.shares) for slot in slots]

    async def start(self, engines: EnginePool, trainers: Starts) -> None:
        """One after the other, because an engine sizes itself by the memory free at its start. Engines import vLLM
        while the trainers load.
        """

        async def start_trainers() -> None:
            for group, start in trainers:
                await start()
                await self._loaded(group)

        await asyncio.gather(engines.prepare(), start_trainers())
        await engines.start()

    async def _loaded(self, trainer: ModelGroup) -> None:
        """Called once a trainer has loaded its model."""

    def engine_margin(self, scored_tokens: int) -> Margin:
        """Engines start when the trainers have loaded their models, before the first step. A KV cache of a given size
        does not grow into what the trainers will need.
        """
        margin = Margin(scored_tokens=scored_tokens)
        if self._config.generator.kv_cache_memory_gb is not None:
            return margin
        return replace(margin, share=SHARE_OF_STAYING_TRAINERS)

    @property
    def cached_sequences(self) -> int | None:
        """An engine's part of the samples in flight, and those of one more prompt, since whole prompts are assigned.
        The number of clients over HTTP is unknown.
        """
        generator, trainer = self._config.generator, self._config.trainer
        if generator.enable_http_endpoint:
            return None
        samples = trainer.groups_in_flight * generator.n_samples_per_prompt
        each = -(-samples // generator.num_inference_engines) + generator.n_samples_per_prompt
        # A sample that waits for its environment keeps its cache; one of a single turn that is not computed has none.
        return min(each, generator.step_sequences) if generator.max_turns == 1 else each


class TakingTurns(SharedDevices):
    """Like `SharedDevices`, but with the memory of one at a time: trainers are offloaded, engines sleep."""

    takes_turns = True

    async def _loaded(self, trainer: ModelGroup) -> None:
        await trainer.offload()

    async def send_first_weights(self, policy: PolicyGroup, engines: EnginePool, weight_sync: WeightSync) -> None:
        await engines.sleep()
        await policy.reload(WEIGHTS)
        await engines.wake_weights()
        await weight_sync.send_once()
        await policy.offload(WEIGHTS)
        await engines.wake_kv_cache()

    def engine_margin(self, scored_tokens: int) -> Margin:
        num_trainers = 1 + len(self._config.trainer.scoring_models)
        return Margin(scored_tokens=scored_tokens, for_trainers=LEFT_BY_TRAINER * num_trainers)


def build_sharing(config: Config) -> OwnDevices:
    placement = config.trainer.placement
    if not placement.colocate_all:
        return OwnDevices(config)
    return TakingTurns(config) if placement.takes_turns else SharedDevices(config)
