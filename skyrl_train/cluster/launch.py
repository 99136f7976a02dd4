"""Configuration -> running processes: placed, started side by side or in turn, and connected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.algorithms.objective import Objective
from skyrl_train.cluster.devices import require_gpus_for_snapshots, require_kernels_for_adapters, sync_backend
from skyrl_train.cluster.placement import Demand, Placement, Slot
from skyrl_train.cluster.pool.engine_group import EngineGroup
from skyrl_train.cluster.pool.engine_settings import all_engine_settings
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.rank_arguments import policy_arguments, reference_arguments
from skyrl_train.cluster.ranks.reference_group import ReferenceGroup
from skyrl_train.cluster.ranks.release import Release, Stay, build_release
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import Config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.engines.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.ranks import WEIGHTS, SavedState

POLICY, REFERENCE, ENGINES = "policy ranks", "reference ranks", "engines"


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes of a run; they know each other and are ready."""

    cluster: Cluster
    placement: Placement
    policy: PolicyGroup
    reference: ReferenceGroup | None
    """None without a KL term."""
    engines: EngineGroup
    release: Release
    """What trainers do out of their turn where they share devices."""
    groups: tuple[WorkerGroup, ...]

    async def stop(self) -> None:
        """End every process."""
        await self.engines.shutdown()
        await asyncio.gather(*(group.shutdown() for group in self.groups))
        self.placement.remove()
        await self.release.close()


async def launch(
    config: Config,
    cluster: Cluster,
    max_model_len: int,
    objective: Objective,
    num_optimizer_steps: int,
    logs: str,
    saved: SavedState | None = None,
) -> Processes:
    """Place and start policy, reference and engines, and connect the way of the weights.

    Args: saved: what the policy goes on with, and the engines then serve.
    Raises: PlacementError if the cluster has no room; RemoteFailed if a process cannot start.
    """
    backend = sync_backend(config, cluster)
    require_gpus_for_snapshots(config.trainer, cluster)
    require_kernels_for_adapters(config, cluster)
    place = config.trainer.placement
    reserve = Placement.reserve_shared if place.colocate_all else Placement.reserve
    placement = await reserve(
        _demands(config),
        use_gpus=cluster.has_gpus,
        cpus_each=place.cpus_per_worker,
        strategy=place.strategy,
        timeout_s=place.timeout_s,
    )
    processes = None
    try:
        version = 0 if saved is None else saved.policy_version
        settings = all_engine_settings(config, max_model_len, backend, version)
        processes = await _spawn(config, cluster, placement, settings, logs)
        await _start(processes, config, objective, num_optimizer_steps, saved)
        if config.trainer.algorithm.needs_reference and processes.reference is None:
            processes = replace(processes, reference=ReferenceGroup.of_policy(processes.policy))
        policy, engines, generator = processes.policy, processes.engines, config.generator
        bucket_bytes = generator.weight_sync_bucket_mb << 20
        await policy.connect_engines(engines, backend, bucket_bytes, generator.weight_sync_timeout_s)
        if not generator.run_engines_locally or config.trainer.policy.model.lora.path is not None or saved is not None:
            # Servers may hold anything, what they loaded or what an earlier run left in them; and local engines hold
            # the base model, from which a policy with an adapter, or with a saved state, does not start.
            await _send_first_weights(processes, config)
    except BaseException:
        if processes is None:
            placement.remove()
        else:
            await processes.stop()
        raise
    return processes


async def _send_first_weights(processes: Processes, config: Config) -> None:
    policy, engines, dtype_name = processes.policy, processes.engines, config.generator.model_dtype
    if not config.trainer.placement.colocate_all:
        await policy.send_weights(dtype_name)
        return
    await engines.sleep()
    await processes.release.enter(policy, WEIGHTS)
    await engines.wake_weights()
    await policy.send_weights(dtype_name)
    await processes.release.leave(policy, WEIGHTS)
    await engines.wake_kv_cache()


@dataclass(frozen=True, slots=True)
class PolicyProcesses:
    """The policy's ranks alone, as supervised fine-tuning needs them."""

    placement: Placement
    policy: PolicyGroup
    group: WorkerGroup

    async def stop(self) -> None:
        """End every process."""
        await self.group.shutdown()
        self.placement.remove()


async def launch_policy(
    trainer: TrainingConfig,
    cluster: Cluster,
    objective: Objective,
    num_optimizer_steps: int,
    logs: str,
    saved: SavedState | None = None,
) -> PolicyProcesses:
    """Place and start the policy. Args, raises: as `launch`."""
    require_gpus_for_snapshots(trainer, cluster)
    place = trainer.placement
    placement = await Placement.reserve(
        [Demand(POLICY, place.num_policy_ranks, 1)],
        use_gpus=cluster.has_gpus,
        cpus_each=place.cpus_per_worker,
        strategy=place.strategy,
        timeout_s=place.timeout_s,
    )
    group = WorkerGroup("policy", placement.slots[POLICY], logs, trainer.timeout_s)
    processes = PolicyProcesses(placement, PolicyGroup(group), group)
    try:
        await processes.policy.start(policy_arguments(trainer, objective, num_optimizer_steps), saved)
    except BaseException:
        await processes.stop()
        raise
    return processes


async def _spawn(
    config: Config,
    cluster: Cluster,
    placement: Placement,
    settings: list[EngineSettings | RemoteEngineSettings],
    logs: str,
) -> Processes:
    """Ask Ray for all processes."""
    trainer, slots = config.trainer, placement.slots
    policy = WorkerGroup("policy", slots[POLICY], logs, trainer.timeout_s)
    groups, shared = [policy], None
    if trainer.placement.colocate_all and cluster.has_gpus:
        shared = await policy.visible_devices()
    if trainer.starts_reference:
        devices = _devices(slots[REFERENCE], shared)
        groups.append(WorkerGroup("reference", slots[REFERENCE], logs, trainer.timeout_s, devices))
    engines = EngineGroup(
        slots[ENGINES],
        settings,
        logs,
        trainer.timeout_s,
        _devices(slots[ENGINES], shared),
        # A replacement starts when it is needed, and would find the devices that it shares in use.
        max_restarts=0 if trainer.placement.colocate_all else config.generator.max_engine_restarts,
    )
    reference = ReferenceGroup(groups[1]) if len(groups) > 1 else None
    release = build_release(trainer) if trainer.placement.colocate_all else Stay()
    return Processes(cluster, placement, PolicyGroup(policy), reference, engines, release, tuple(groups))


def _devices(slots: Sequence[Slot], shared: list[str] | None) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of processes that use the devices of policy ranks; None where Ray says it."""
    return [None if shared is None else ",".join(shared[rank] for rank in slot.shares) for slot in slots]


async def _start(
    processes: Processes, config: Config, objective: Objective, num_optimizer_steps: int, saved: SavedState | None
) -> None:
    """Have all load their models: side by side on devices of their own, else one after the other.

    Whoever is ready leaves a shared device, so that the next finds it empty: engines take what they find. They import
    vLLM meanwhile.
    """
    policy, reference, engines = processes.policy, processes.reference, processes.engines
    starts = [policy.start(policy_arguments(config.trainer, objective, num_optimizer_steps), saved)]
    if reference is not None:
        starts.append(reference.start(reference_arguments(config)))

    async def start_trainers() -> None:
        for start, group in zip(starts, (policy, reference), strict=False):
            assert group is not None
            await start
            await processes.release.leave(group)

    if config.trainer.placement.colocate_all:
        await asyncio.gather(engines.prepare(), start_trainers())
        await engines.start()
    else:
        await asyncio.gather(engines.start(), *starts)


def _demands(config: Config) -> list[Demand]:
    trainer, generator = config.trainer, config.generator
    place = trainer.placement
    demands = [
        Demand(POLICY, place.num_policy_ranks, 1),
        Demand(ENGINES, generator.num_inference_engines, generator.inference_engine_tensor_parallel_size)
        if generator.run_engines_locally
        else Demand(ENGINES, len(generator.remote_inference_engine_urls), 0),
    ]
    if trainer.starts_reference:
        demands.insert(1, Demand(REFERENCE, place.ref_num_nodes * place.ref_num_gpus_per_node, 1))
    return demands
