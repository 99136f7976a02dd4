"""Requirements of a configuration on the cluster: a transport for weights, kernels, memory snapshots, endpoints."""

from __future__ import annotations

from skyrl_train.cluster.placement import PlacementError
from skyrl_train.cluster.process import alive_nodes
from skyrl_train.cluster.session import Cluster
from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.config.values import is_loopback
from skyrl_train.weight_sync.channels.table import transport


def require_gpus_for_snapshots(trainer: TrainingConfig, cluster: Cluster) -> None:
    """Raises: PlacementError if device memory is to be recorded and there are no GPUs."""
    models = {"trainer.policy": trainer.policy.megatron_config}
    if isinstance(trainer, TrainerConfig):
        models |= {model.key: model.megatron_config for model in trainer.scoring_models}
    asking = [key for key, megatron in models.items() if megatron.torch_profiler_config.record_memory]
    if asking and not cluster.has_gpus:
        raise PlacementError(
            f"{asking[0]}.megatron_config.torch_profiler_config.record_memory is true, and the cluster has no "
            "GPUs whose memory could be recorded. Set it to false (torch_profiler_config.enable works on CPUs too)"
        )


def require_kernels_for_adapters(config: Config, cluster: Cluster) -> None:
    """Raises: PlacementError for float32 adapters in engines on GPUs."""
    lora, generator = config.trainer.policy.model.lora, config.generator
    if lora.rank > 0 and lora.sync == "adapter" and generator.model_dtype == "float32" and cluster.has_gpus:
        raise PlacementError(
            "trainer.policy.model.lora.sync is adapter and generator.model_dtype is float32: vLLM's kernels for "
            "adapters on GPUs support half precision only. Set lora.sync=merged, or trainer.bf16=true and "
            "generator.model_dtype=bfloat16"
        )


def sync_backend(config: Config, cluster: Cluster) -> str:
    """Transport of the weights to the engines. auto is shared memory if all processes are CPU processes of one host,
    CUDA IPC if engines and policy share GPUs, and a broadcast otherwise.

    Raises: PlacementError if the devices do not support the transport.
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
        fix = "broadcast" if needs.for_stock_servers else "auto"
        raise PlacementError(f"generator.weight_sync_backend is {asked}, and the cluster has no GPUs. Use {fix}")
    if needs.shares_gpus is False and cluster.has_gpus and is_shared:
        raise PlacementError(
            f"generator.weight_sync_backend is {asked} and trainer.placement.colocate_all is true: NCCL takes each GPU "
            "once, but policy and engines share them. Use auto"
        )
    return asked


def endpoint_warning(generator: GeneratorConfig) -> str | None:
    """Warning if nodes of the cluster cannot reach each other's HTTP endpoints; None if they can, or have none."""
    host, num_nodes = generator.http_endpoint_host, len(alive_nodes())
    if not generator.enable_http_endpoint or not is_loopback(host) or num_nodes == 1:
        return None
    return (
        f"generator.http_endpoint_host is {host}: each of the cluster's {num_nodes} nodes can reach only the engines "
        "on itself. For clients on other nodes set generator.http_endpoint_host=0.0.0.0 and generator.http_api_key"
    )
