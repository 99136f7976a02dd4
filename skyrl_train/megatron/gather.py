"""The weights of all pipeline stages on more ranks than their own stage's.

Elsewhere each stage sends its own (megatron/export.py). Receivers that can have only one sender need all of them on the
first stage; receivers that share a GPU with one rank each need them on every rank. Both cost one more copy of the
other stages' weights over the trainer's network.
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
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stage = _specs_of_stages(specs, group)
    if len(of_stage) == 1:
        return list(specs), named_tensors
    return [spec for stage in of_stage for spec in stage], _move(named_tensors, of_stage, group)


def to_every_stage(specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> tuple[list[TensorSpec], NamedTensors]:
    """As `to_first_stage`, but every rank gets the tensors of all stages, stage after stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    of_stage = _specs_of_stages(specs, group)
    if len(of_stage) == 1:
        return list(specs), named_tensors
    return [spec for stage in of_stage for spec in stage], _spread(named_tensors, of_stage, group)


def _specs_of_stages(specs: Sequence[TensorSpec], group: dist.ProcessGroup) -> list[list[TensorSpec]]:
    of_stage: list[list[TensorSpec]] = [[] for _ in range(group.size())]
    dist.all_gather_object(of_stage, list(specs), group=group)
    return of_stage


def _spread(
    named_tensors: NamedTensors, of_stage: Sequence[Sequence[TensorSpec]], group: dist.ProcessGroup
) -> NamedTensors:
    for source, stage in zip(dist.get_process_group_ranks(group), of_stage, strict=True):
        if source == dist.get_rank():
            for name, tensor in named_tensors:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, source, group=group)
                yield name, tensor
            continue
        for spec in stage:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device())
            dist.broadcast(tensor, source, group=group)
            yield spec.name, tensor


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
