"""What a configuration asks of the cluster's devices: a transport for weights, kernels, and records of memory."""

from __future__ import annotations

from skyrl_train.cluster.placement import PlacementError
from skyrl_train.cluster.session import Cluster
from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.weight_sync.channels.table import transport


def require_gpus_for_snapshots(trainer: TrainingConfig, cluster: Cluster) -> None:
    """Raises: PlacementError if device memory is to be recorded and no rank has any."""
    models = {"policy": trainer.policy.megatron_config}
    if isinstance(trainer, TrainerConfig) and trainer.starts_reference:
        models["ref"] = trainer.ref.megatron_config
    asking = [name for name, megatron in models.items() if megatron.torch_profiler_config.record_memory]
    if asking and not cluster.has_gpus:
        raise PlacementError(
            f"trainer.{asking[0]}.megatron_config.torch_profiler_config.record_memory is true, and the cluster has no "
            "GPUs whose memory could be recorded: set it to false (enable writes traces on a CPU too)"
        )


def require_kernels_for_adapters(config: Config, cluster: Cluster) -> None:
    """Raises: PlacementError for engines on GPUs that are to compute with float32 adapters."""
    lora, generator = config.trainer.policy.model.lora, config.generator
    if lora.rank > 0 and lora.sync == "adapter" and generator.model_dtype == "float32" and cluster.has_gpus:
        raise PlacementError(
            "trainer.policy.model.lora.sync is adapter and generator.model_dtype float32: vLLM's kernels for adapters "
            "on GPUs multiply half precision alone, use lora.sync=merged, or trainer.bf16=true and model_dtype=bfloat16"
        )


def sync_backend(config: Config, cluster: Cluster) -> str:
    """The transport of the weights to the engines. auto is shared memory where all processes are CPU processes of one
    host, CUDA IPC where engines and policy share GPUs, a broadcast elsewhere.

    Raises: PlacementError if the devices cannot do what is asked.
    """
    generator, is_shared = config.generator, build_sharing(config).is_shared
    asked = generator.weight_sync_backend
    if asked == "auto":
        if not generator.run_engines_locally:
            return "broadcast"
        if cluster.has_gpus:
            return "cuda_ipc" if is_shared else "broadcast"
        return "shm" if cluster.is_local else "broadcast"
    needs = transport(asked)
    if needs.needs_gpus and not cluster.has_gpus:
        cure = "broadcast" if needs.for_stock_servers else "auto"
        raise PlacementError(f"generator.weight_sync_backend is {asked}, and the cluster has no GPUs: use {cure}")
    if needs.shares_gpus is False and cluster.has_gpus and is_shared:
        raise PlacementError(
            f"generator.weight_sync_backend is {asked} and trainer.placement.colocate_all true: NCCL takes each GPU "
            "once, and policy and engines share them, use auto"
        )
    return asked
