"""The weights of all pipeline stages on the first one, for receivers that can have only one sender.

Elsewhere each stage sends its own (megatron/export.py). This costs one more copy of the other stages' weights over the
trainer's network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.export import is_stage_owner
from skyrl_train.weight_sync.bucket import TensorSpec

NamedTensors = Iterator[tuple[str, Tensor]]


def to_first_stage(specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> tuple[list[TensorSpec], NamedTensors]:
    """A collective over all ranks, and so is draining the tensors.

    Args: what this rank's stage exports.
    Returns: the specs of all stages, and on the first stage's owner their tensors, stage after stage; on other ranks
        those of their own stage.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return list(specs), named_tensors
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stage: list[list[TensorSpec]] = [[] for _ in range(group.size())]
    dist.all_gather_object(of_stage, list(specs), group=group)
    return [spec for stage in of_stage for spec in stage], _move(named_tensors, of_stage, group)


def _move(
    named_tensors: NamedTensors, of_stage: Sequence[Sequence[TensorSpec]], group: dist.ProcessGroup
) -> NamedTensors:
    first, *others = dist.get_process_group_ranks(group)
    is_first, is_owner = dist.get_rank() == first, is_stage_owner()
    for name, tensor in named_tensors:
        if is_owner and not is_first:
            dist.send(tensor.contiguous(), dst=first, group=group)
        yield name, tensor
    if is_owner and is_first:
        for source, specs in zip(others, of_stage[1:], strict=True):
            for spec in specs:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device())
                dist.recv(tensor, src=source, group=group)
                yield spec.name, tensor
