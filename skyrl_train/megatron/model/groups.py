"""Fewer process groups than Megatron makes, and fewer channels where little is sent.

Each group over which something is reduced gets an NCCL communicator of its own, and even one of a single rank takes
0.38 GiB of an H200 if NCCL is left to choose, one of two that reduces and sends 0.85 GiB (docs/gpu_performance.md).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from skyrl_train.device import few_channels

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
"""Of a group of one rank, which sends nothing."""
CHANNELS_OF_LITTLE = 8
"""Of the default group, of those used between passes and of pipelines, whose stages send one another some ten MiB for
each micro-batch. Groups of tensor, context, expert and data parallelism have what NCCL chooses."""


def options_of_default_group(world_size: int, timeout: datetime.timedelta) -> Any:
    """torch's `pg_options`; None without a GPU."""
    return few_channels(CHANNELS_ALONE if world_size == 1 else CHANNELS_OF_LITTLE, timeout)


@contextlib.contextmanager
def few_groups(*, overlapped_pipeline: bool) -> Iterator[None]:
    """Of the groups that Megatron makes inside, those of one rank, those used between passes and the pipeline's are
    shared.

    Nothing can wait for another in a group of one; and between passes ranks do the same things in the same order, so
    groups of the same ranks can be one. Those whose transfers overlap with others' stay apart; with
    `overlapped_pipeline` (virtual stages) the pipeline's is one of them.
    """
    create = parallel_state.create_group
    shared = BETWEEN_PASSES if overlapped_pipeline else BETWEEN_PASSES | {PIPELINE}
    made: dict[tuple[tuple[int, ...], str | None], Any] = {}

    def create_or_share(ranks: list[int], **kwargs: Any) -> Any:
        name, timeout = kwargs.get("group_desc"), kwargs.get("timeout")
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
