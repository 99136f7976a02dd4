"""A run is put together here, from its configuration: for training, fine-tuning and the service."""

from __future__ import annotations

from transformers import PretrainedConfig

from skyrl_train.algorithms.objective import Objective, cross_entropy_objective
from skyrl_train.cluster.launch import PolicyProcesses, Processes, launch, launch_policy
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import Config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.flops import num_experts
from skyrl_train.ranks import SavedState
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.agreement.first_check import FirstCheck
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound
from skyrl_train.trainer.agreement.sync_check import SyncCheck
from skyrl_train.trainer.learner import Learner
from skyrl_train.trainer.memory_report import MemoryReport
from skyrl_train.trainer.residency import Colocated, Dedicated, Residency
from skyrl_train.trainer.rules import micro_batch_rules, objective
from skyrl_train.trainer.signal import Signal


def max_model_len(config: Config, model: PretrainedConfig) -> int:
    """Tokens of the longest prompt and response that an engine will be asked for."""
    return min(config.generator.longest_conversation, model.max_position_embeddings)


async def launch_training(
    config: Config,
    model: PretrainedConfig,
    cluster: Cluster,
    num_optimizer_steps: int,
    logs: str,
    saved: SavedState | None = None,
) -> Processes:
    """The processes of reinforcement learning. Args, raises: as `launch`."""
    goal = _objective(config)
    return await launch(config, cluster, max_model_len(config, model), goal, num_optimizer_steps, logs, saved)


async def launch_fine_tuning(
    trainer: TrainingConfig, cluster: Cluster, num_optimizer_steps: int, logs: str, saved: SavedState | None = None
) -> PolicyProcesses:
    """The processes of supervised fine-tuning. Args, raises: as `launch`."""
    goal = cross_entropy_objective(trainer.policy.megatron_config.logprobs_chunk_size)
    return await launch_policy(trainer, cluster, goal, num_optimizer_steps, logs, saved)


def build_learner(config: Config, model: PretrainedConfig, processes: Processes, timers: Timers) -> Learner:
    """The learner of started processes."""
    trainer, dtype_name = config.trainer, config.generator.model_dtype
    rules = micro_batch_rules(trainer, model, processes.policy.dp_size)
    coarser_dtype = "bfloat16" if trainer.bf16 else dtype_name
    # Servers that run already were not told otherwise (engines/settings.py).
    tensor_float = processes.cluster.has_gpus and not config.generator.run_engines_locally
    check = SyncCheck(trainer.verify_sync_every, coarser_dtype, rules, tensor_float=tensor_float)
    return Learner(
        config,
        rules=rules,
        policy=processes.policy,
        reference=processes.reference,
        residency=_residency(processes, check),
        timers=timers,
        bound=LogprobBound(
            trainer.logprob_difference,
            coarser_dtype,
            tensor_float=tensor_float,
            has_experts=num_experts(model) > 0,
        ),
        first_check=FirstCheck(check, processes.policy, processes.engines),
        signal=_signal(config, model),
    )


def _signal(config: Config, model: PretrainedConfig) -> Signal:
    algorithm = config.trainer.algorithm
    has_balancing = config.trainer.policy.megatron_config.moe_aux_loss_coeff > 0 and num_experts(model) > 0
    has_penalty = algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0
    return Signal(_objective(config), has_other_terms=has_balancing or has_penalty)


def _objective(config: Config) -> Objective:
    chunk_size = config.trainer.policy.megatron_config.logprobs_chunk_size
    return objective(config.trainer.algorithm, config.generator.sampling_params, chunk_size)


def _residency(processes: Processes, check: SyncCheck) -> Residency:
    policy, reference, engines = processes.policy, processes.reference, processes.engines
    processes.weight_sync.verify_with(check)
    report = MemoryReport(policy, reference, engines)
    if not processes.sharing.is_shared:
        return Dedicated(processes.weight_sync, report)
    return Colocated(policy, reference, engines, processes.weight_sync, processes.sharing.release, report)
