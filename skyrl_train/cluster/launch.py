"""Configuration -> running processes: placed, started and connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from skyrl_train.algorithms.objective import Objective, cross_entropy_objective
from skyrl_train.cluster.demands import ENGINES, POLICY, demands, engines_of, loads, ranks_of
from skyrl_train.cluster.devices import require_gpus_for_snapshots, require_kernels_for_adapters, sync_backend
from skyrl_train.cluster.downloads import download_to_nodes, policy_load
from skyrl_train.cluster.eval_engines import EvalEngines
from skyrl_train.cluster.placement import Demand, Placement
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.pool.settings import all_engine_settings, api_key, teacher_engine_settings
from skyrl_train.cluster.pool.teacher import TeacherEngines
from skyrl_train.cluster.ranks.critic_group import CriticGroup
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.rank_arguments import critic_arguments, frozen_arguments, num_likeliest, policy_arguments
from skyrl_train.cluster.ranks.scorer_group import FrozenGroup, ScorerGroup
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.cluster.session import Cluster
from skyrl_train.cluster.sharing import OwnDevices, build_sharing
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.config import Config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.engines.remote.scoring import ServedTeacher
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.hf.hub import local_folder
from skyrl_train.ranks import SavedState


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes of a run, connected and ready."""

    cluster: Cluster
    placement: Placement
    policy: PolicyGroup
    scorers: tuple[ScorerGroup, ...]
    """Frozen models, such as the reference of a KL term."""
    critic: CriticGroup | None
    teachers: tuple[TeacherEngines | ServedTeacher, ...]
    """Engines or servers of `trainer.served_teachers`."""
    engines: EnginePool
    eval_engines: EvalEngines | None
    weight_sync: WeightSync
    sharing: OwnDevices
    groups: tuple[WorkerGroup, ...]

    @property
    def other_engines(self) -> tuple[TeacherEngines | ServedTeacher | EvalEngines, ...]:
        """Engines that generate no samples for training."""
        return self.teachers if self.eval_engines is None else (*self.teachers, self.eval_engines)

    async def stop(self) -> None:
        await self.engines.shutdown()
        await asyncio.gather(*(others.shutdown() for others in self.other_engines))
        await asyncio.gather(*(group.shutdown() for group in self.groups))
        self.placement.remove()


async def launch(
    config: Config,
    cluster: Cluster,
    *,
    max_model_len: int,
    objective: Objective,
    num_optimizer_steps: int,
    logs: str,
    saved: SavedState | None = None,
    teacher_max_model_len: int = 0,
) -> Processes:
    """Place and start policy, critic, frozen models and engines, and connect the weight sync.

    Args: saved: state from which policy and critic resume, and which the engines then serve; teacher_max_model_len: of
        engines that score with a teacher, if there are any.
    Raises: PlacementError if the cluster has no room; RemoteFailed if a process cannot start.
    """
    backend = sync_backend(config, cluster)
    require_gpus_for_snapshots(config.trainer, cluster)
    require_kernels_for_adapters(config, cluster)
    placement = await build_sharing(config).reserve(demands(config), cluster.has_gpus)
    processes = None
    try:
        await download_to_nodes(loads(config, placement), config.trainer.download_timeout_s)
        version = 0 if saved is None else saved.num_steps
        settings = all_engine_settings(config, max_model_len, backend, version)
        teachers = _teachers(config, placement, teacher_max_model_len, backend, logs)
        processes = await _spawn(config, cluster, placement, settings, teachers, objective, logs)
        await _start(processes, config, objective, num_optimizer_steps, saved)
        await processes.weight_sync.senders.connect()
        if (
            not config.generator.run_engines_locally
            or config.trainer.policy.model.lora.path is not None
            or saved is not None
        ):
            # Servers may hold any weights, and local engines hold the base model, from which a policy with an adapter
            # or a saved state differs.
            await processes.sharing.send_first_weights(processes.policy, processes.engines, processes.weight_sync)
    except BaseException:
        if processes is None:
            placement.remove()
        else:
            await processes.stop()
        raise
    return processes


@dataclass(frozen=True, slots=True)
class PolicyProcesses:
    """The policy's ranks alone, for supervised fine-tuning."""

    placement: Placement
    policy: PolicyGroup

    async def stop(self) -> None:
        await self.policy.group.shutdown()
        self.placement.remove()


async def launch_policy(
    trainer: TrainingConfig, cluster: Cluster, num_optimizer_steps: int, logs: str, saved: SavedState | None = None
) -> PolicyProcesses:
    """Place and start the policy for fine-tuning. Args, Raises: like `launch`."""
    require_gpus_for_snapshots(trainer, cluster)
    demands = [Demand(POLICY, trainer.placement.num_policy_ranks, 1)]
    placement = await Placement.reserve(demands, trainer.placement, use_gpus=cluster.has_gpus)
    slots = placement.slots[POLICY]
    group = WorkerGroup("policy", slots, logs, trainer.timeout_s)
    processes = PolicyProcesses(placement, PolicyGroup(group))
    try:
        await download_to_nodes([policy_load(trainer, *slots)], trainer.download_timeout_s)
        arguments = policy_arguments(trainer, cross_entropy_objective(), num_optimizer_steps)
        await processes.policy.start(arguments, saved)
    except BaseException:
        await processes.stop()
        raise
    return processes


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Engines without a trainer, which serve the files of a model."""

    placement: Placement
    engines: EnginePool

    async def stop(self) -> None:
        await self.engines.shutdown()
        self.placement.remove()


async def launch_engines(config: Config, cluster: Cluster, *, max_model_len: int, logs: str) -> EngineProcesses:
    """Place and start engines. One that dies is not replaced. Args, Raises: like `launch`."""
    generator = config.generator
    settings = all_engine_settings(config, max_model_len, sync_backend(config, cluster))
    demands = [Demand(ENGINES, generator.num_inference_engines, generator.inference_engine_tensor_parallel_size)]
    placement = await Placement.reserve(demands, config.trainer.placement, use_gpus=cluster.has_gpus)
    slots, trainer = placement.slots[ENGINES], config.trainer
    engines = EnginePool(slots, settings, logs, trainer.timeout_s)
    processes = EngineProcesses(placement, engines)
    try:
        await download_to_nodes([policy_load(trainer, *slots)], trainer.download_timeout_s)
        await engines.start()
    except BaseException:
        await processes.stop()
        raise
    return processes


async def _spawn(
    config: Config,
    cluster: Cluster,
    placement: Placement,
    settings: list[EngineSettings],
    teachers: tuple[TeacherEngines | ServedTeacher, ...],
    objective: Objective,
    logs: str,
) -> Processes:
    trainer, slots, sharing = config.trainer, placement.slots, build_sharing(config)
    modules = trainer.custom_modules
    groups = [WorkerGroup("policy", slots[POLICY], logs, trainer.timeout_s, custom_modules=modules)]
    scorers = []
    critic = None
    for model in trainer.scoring_models:
        devices = await sharing.visible_devices(groups[0], slots[ranks_of(model)])
        groups.append(WorkerGroup(model.name, slots[ranks_of(model)], logs, trainer.timeout_s, devices, modules))
        if model.is_trained:
            critic = CriticGroup(groups[-1])
        else:
            method = "teacher_logprobs" if model.is_teacher else "logprobs"
            frozen = FrozenGroup(groups[-1])
            scorers.append(ScorerGroup(model.name, model.signal, frozen, method, model.data_sources))
    devices = await sharing.visible_devices(groups[0], slots[ENGINES])
    restarts, num_rollout = sharing.max_engine_restarts, config.generator.num_rollout_engines
    pool = partial(EnginePool, log_folder=logs, timeout_s=trainer.timeout_s, max_restarts=restarts)
    engines = pool(slots[ENGINES][:num_rollout], settings[:num_rollout], visible_devices=devices[:num_rollout])
    policy, eval_engines = PolicyGroup(groups[0]), None
    if config.generator.eval_num_engines:
        silent = [each.changed(enable_http_endpoint=False) for each in settings[num_rollout:]]
        reserved = pool(slots[ENGINES][num_rollout:], silent, name="eval-engine")
        eval_engines = EvalEngines(reserved, policy, settings[0].generator)
    own = partial(ScorerGroup, model=policy)  # the policy itself, as the reference and base teachers without adapters
    if trainer.algorithm.needs_reference and trainer.policy.model.lora.rank > 0:
        scorers.append(own("reference", "ref_logprobs", method="reference_logprobs"))
    teacher, topk = partial(own, method="teacher_logprobs"), num_likeliest(trainer, objective)
    for model in trainer.base_teachers:
        scorers.append(teacher(model.name, model.name, data_sources=model.data_sources, arguments=(topk, True)))
    if trainer.teacher.backend == "policy":
        scorers.append(teacher("teacher", "teacher", arguments=(topk, False)))
    return Processes(
        cluster=cluster,
        placement=placement,
        policy=policy,
        scorers=tuple(scorers),
        critic=critic,
        teachers=teachers,
        engines=engines,
        eval_engines=eval_engines,
        weight_sync=WeightSync(policy, engines, settings[0].generator),
        sharing=sharing,
        groups=tuple(groups),
    )


async def _start(
    processes: Processes, config: Config, objective: Objective, num_optimizer_steps: int, saved: SavedState | None
) -> None:
    policy = processes.policy
    arguments = policy_arguments(config.trainer, objective, num_optimizer_steps)
    trainers: list[tuple[ModelGroup, Callable[[], Awaitable[None]]]] = [
        (policy, partial(policy.start, arguments, saved))
    ]
    frozen = [scorer.model for scorer in processes.scorers if not scorer.is_policy]
    for group, model in zip(frozen, config.trainer.frozen_models, strict=True):
        trainers.append((group, partial(group.start, frozen_arguments(config, model, objective))))
    if (critic := processes.critic) is not None:
        state = None if saved is None else saved.critic
        trainers.append((critic, partial(critic.start, critic_arguments(config, num_optimizer_steps), state)))
    starts = (others.start() for others in processes.other_engines)
    await asyncio.gather(processes.sharing.start(processes.engines, trainers), *starts)


def _teachers(
    config: Config, placement: Placement, max_model_len: int, backend: str, logs: str
) -> tuple[TeacherEngines | ServedTeacher, ...]:
    """Engines, or connections to servers, that score with a teacher."""
    trainer, generator, found = config.trainer, config.generator, []
    for model in trainer.served_teachers:
        teacher: TeacherEngines | ServedTeacher
        if trainer.teacher.backend == "remote":
            teacher = ServedTeacher(
                model.model_path,
                api_key(generator),
                policy_path=local_folder(trainer.policy.model.path),
                trust_remote_code=trainer.trust_remote_code,
                max_model_len=max_model_len,
                timeout_s=trainer.timeout_s,
            )
        else:
            settings = teacher_engine_settings(config, model, max_model_len, backend)
            slots, restarts = placement.slots[engines_of(model)], generator.max_engine_restarts
            pool = EnginePool(
                slots, settings, logs, trainer.timeout_s, max_restarts=restarts, name=f"{model.name}-engine"
            )
            teacher = TeacherEngines(pool)
        found.append(teacher)
    return tuple(found)
