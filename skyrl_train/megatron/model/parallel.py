"""Sizes, ranks and process groups of the Megatron layout in this process."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.device import allocate_in_pages, device_type, distributed_backend
from skyrl_train.megatron.model.groups import few_groups, options_of_default_group
from skyrl_train.ranks import ParallelRanks, Rendezvous
from skyrl_train.stores import join_store


def join(rendezvous: Rendezvous, config: MegatronConfig, seed: int) -> ParallelRanks:
    """Join the process group and build Megatron's groups. All ranks give the same seed."""
    if device_type() == "cpu":
        from skyrl_train.megatron.model import cpu

        cpu.enable()
    else:
        torch.cuda.set_device(rendezvous.rank % torch.cuda.device_count())
        allocate_in_pages()
        # On the host a rank has small index tensors only: packing a batch took 0.01 s with one thread and, on 64 busy
        # cores, 0.4 to 1.5 s with as many as torch takes.
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
    dist.init_process_group(
        distributed_backend(),
        store=join_store(rendezvous),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        pg_options=options_of_default_group(rendezvous.world_size, timeout),
    )
    with few_groups(overlapped_pipeline=config.virtual_pipeline_model_parallel_size is not None):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelRanks(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )
