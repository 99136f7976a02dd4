"""Process groups of the Megatron layout, fewer than Megatron makes and with fewer channels where little is sent.

Each group over which something is reduced gets its own NCCL communicator: one of a single rank takes 0.38 GiB of
an H200 with NCCL's defaults, one of two that reduces and sends 0.85 GiB (docs/readings/gpu_performance.md).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.device import device_type
from skyrl_train.device.memory import allocate_in_pages
from skyrl_train.ranks import ParallelRanks, Rendezvous
from skyrl_train.stores import join_store

BETWEEN_PASSES = frozenset(
    {
        "MODEL_PARALLEL_GROUP",
        "EMBEDDING_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",  # 0.19
    }
)
"""Groups that Megatron uses after the backward pass only: gradients of a tied embedding, and norms."""
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
"""Its messages come in the same order on both sides, and before what is reduced between passes."""
CHANNELS_ALONE = 1
"""Channels of a group of one rank, which sends nothing."""
CHANNELS_OF_LITTLE = 8
"""Channels of the default group, of those used between passes and of pipelines, whose stages send one another about ten
MiB per micro-batch. Groups of tensor, context, expert and data parallelism have NCCL's default."""


def join(rendezvous: Rendezvous, config: MegatronConfig, seed: int) -> ParallelRanks:
    """Join the process group and build Megatron's groups. All ranks pass the same seed."""
    if device_type() == "cpu":
        from skyrl_train.megatron.model import cpu

        cpu.enable()
    else:
        torch.cuda.set_device(rendezvous.rank % torch.cuda.device_count())
        allocate_in_pages()
        # On the host a rank has small index tensors only: packing a batch took 0.01 s with one thread and, on 64 busy
        # cores, 0.4 to 1.5 s with torch's default.
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo",
        store=join_store(rendezvous),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        pg_options=few_channels(CHANNELS_ALONE if rendezvous.world_size == 1 else CHANNELS_OF_LITTLE, timeout),
    )
    with few_groups(timeout, overlapped_pipeline=config.virtual_pipeline_model_parallel_size is not None):
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


def few_channels(count: int, timeout: datetime.timedelta | None) -> Any:
    """Options of a process group (torch's `pg_options`) with at most `count` channels; None without a GPU.

    NCCL chooses up to 32 for its fastest collectives, and each has its own buffers on the device: 8 MiB for sends
    over a network, which even a group of one rank gets, 12 MiB for each neighbour in a ring and in a tree, and 12 MiB
    for sends between two GPUs (https://github.com/NVIDIA/nccl/issues/1685 and 2363).
    """
    if device_type() == "cpu":
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = count
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from the group's
    return options


@contextlib.contextmanager
def few_groups(timeout: datetime.timedelta, *, overlapped_pipeline: bool) -> Iterator[None]:
    """Share groups that Megatron makes inside: those of one rank, those used between passes and the pipeline's.

    All get this timeout instead of Megatron's 30 minutes. No rank waits for another in a group of one; and between
    passes ranks do the same things in the same order, so groups of the same ranks can be one. Groups whose transfers
    overlap with others' stay separate; with `overlapped_pipeline` (virtual stages) the pipeline's is one of them.
    """
    create = parallel_state.create_group
    shared = BETWEEN_PASSES if overlapped_pipeline else BETWEEN_PASSES | {PIPELINE}
    made: dict[tuple[tuple[int, ...], str | None], Any] = {}

    def create_or_share(ranks: list[int], **kwargs: Any) -> Any:
        name, kwargs["timeout"] = kwargs.get("group_desc"), timeout
        if len(ranks) == 1:
            kwargs["pg_options"] = few_channels(CHANNELS_ALONE, timeout)
        elif name in BETWEEN_PASSES or name == PIPELINE:
            kwargs["pg_options"] = few_channels(CHANNELS_OF_LITTLE, timeout)
        if len(ranks) > 1 and name not in shared:
            return create(ranks, **kwargs)
        backend = kwargs.get("backend")
        if len(ranks) == dist.get_world_size() and backend is None:
            return dist.group.WORLD
        key = tuple(sorted(ranks)), backend
        if key not in made:
            made[key] = create(ranks, **kwargs)
        return made[key]

    parallel_state.create_group = create_or_share
    try:
        yield
    finally:
        parallel_state.create_group = create
