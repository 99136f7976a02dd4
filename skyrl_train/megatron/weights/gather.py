"""The weights of all pipeline stages on more ranks than their own stage's.

Elsewhere each stage sends its own (export.py). Receivers that can have only one sender need all of them on the first
stage; receivers that share a GPU with one rank each need them on every rank. Both cost one more copy of the
other stages' weights over the trainer's network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.weights.export import is_stage_owner
from skyrl_train.megatron.weights.gather_plain import gather_json
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
    messages = gather_json([spec.to_message() for spec in specs], group)
    return [[TensorSpec.from_message(message) for message in stage] for stage in messages]


class _Export:
    """What this rank's stage exports. If that fails, zeros take the place of what is missing, because the other ranks
    wait for it; `raise_error` then ends the gathering."""

    def __init__(self, named_tensors: NamedTensors, specs: Sequence[TensorSpec]) -> None:
        self._named_tensors, self._specs = named_tensors, specs
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, whether it is exported)"""
        count = 0
        try:
            for name, tensor in self._named_tensors:
                yield name, tensor.contiguous(), True
                count += 1
        except Exception as error:
            self._error = error
        for spec in self._specs[count:] if self._error is not None else ():
            yield spec.name, torch.zeros(spec.shape, dtype=spec.dtype, device=device()), False

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _spread(
    named_tensors: NamedTensors, of_stage: Sequence[Sequence[TensorSpec]], group: dist.ProcessGroup
) -> NamedTensors:
    own = dist.get_rank(group)
    export = _Export(named_tensors, of_stage[own])
    for number, (source, specs) in enumerate(zip(dist.get_process_group_ranks(group), of_stage, strict=True)):
        if number == own:
            for name, tensor, is_exported in export:
                dist.broadcast(tensor, source, group=group)
                if is_exported:
                    yield name, tensor
            continue
        for spec in specs:
            tensor = _empty(spec)
            dist.broadcast(tensor, source, group=group)
            yield spec.name, tensor
    export.raise_error()


def _move(
    named_tensors: NamedTensors, of_stage: Sequence[Sequence[TensorSpec]], group: dist.ProcessGroup
) -> NamedTensors:
    first, *others = dist.get_process_group_ranks(group)
    is_first, is_owner = dist.get_rank() == first, is_stage_owner()
    export = _Export(named_tensors, of_stage[dist.get_rank(group)])
    for name, tensor, is_exported in export:
        if is_owner and not is_first:
            _pass_on(dist.isend, tensor, first, group)
        if is_exported:
            yield name, tensor
    if is_owner and is_first:
        for source, specs in zip(others, of_stage[1:], strict=True):
            for spec in specs:
                tensor = _empty(spec)
                _pass_on(dist.irecv, tensor, source, group)
                yield spec.name, tensor
    export.raise_error()


def _pass_on(operation: Any, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """As a batch of one: a message on its own would get an NCCL communicator for its two ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device())
