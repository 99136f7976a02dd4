"""The weights of all pipeline stages on other ranks than their own stage's.

Usually each stage sends its own (export.py). Receivers that accept only one sender need all of them on the first stage;
receivers that share a GPU with one rank each need them on every rank. Both cost one more copy of the other stages'
weights over the trainer's network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.weights.export import is_stage_owner
from skyrl_train.megatron.weights.gather import gather_json
from skyrl_train.weight_sync.bucket import TensorSpec

NamedTensors = Iterator[tuple[str, Tensor]]
Specs = Sequence[TensorSpec]


def to_first_stage(specs: Specs, named_tensors: NamedTensors) -> tuple[list[TensorSpec], NamedTensors]:
    """A collective over all ranks, and so is draining the tensors.

    Args: what this rank's stage exports.
    Returns: the specs of all stages, and on the first stage's owner their tensors, stage after stage; on other ranks
        those of their own stage.
    """
    return _of_all_stages(specs, named_tensors, _send_to_first)


def to_every_stage(specs: Specs, named_tensors: NamedTensors) -> tuple[list[TensorSpec], NamedTensors]:
    """Like `to_first_stage`, but every rank gets the tensors of all stages, stage after stage."""
    return _of_all_stages(specs, named_tensors, _broadcast)


def _of_all_stages(
    specs: Specs, named_tensors: NamedTensors, move: Callable[..., NamedTensors]
) -> tuple[list[TensorSpec], NamedTensors]:
    group = parallel_state.get_pipeline_model_parallel_group()
    messages = gather_json([spec.to_message() for spec in specs], group)
    if len(messages) == 1:
        return list(specs), named_tensors
    stages = [[TensorSpec.from_message(message) for message in stage] for stage in messages]
    return [spec for stage in stages for spec in stage], move(named_tensors, stages, group)


class _Export:
    """This rank's export. If it fails, zeros replace the missing tensors, because the other ranks wait for them;
    `raise_error` then ends the gathering."""

    def __init__(self, named_tensors: NamedTensors, specs: Specs) -> None:
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


def _broadcast(named_tensors: NamedTensors, stages: Sequence[Specs], group: dist.ProcessGroup) -> NamedTensors:
    own = dist.get_rank(group)
    export = _Export(named_tensors, stages[own])
    for number, (source, specs) in enumerate(zip(dist.get_process_group_ranks(group), stages, strict=True)):
        if number == own:
            for name, tensor, is_exported in export:
                dist.broadcast(tensor, source, group=group)
                if is_exported:
                    yield name, tensor
            continue
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device())
            dist.broadcast(tensor, source, group=group)
            yield spec.name, tensor
    export.raise_error()


def _send_to_first(named_tensors: NamedTensors, stages: Sequence[Specs], group: dist.ProcessGroup) -> NamedTensors:
    first, *others = dist.get_process_group_ranks(group)
    is_first, is_owner = dist.get_rank() == first, is_stage_owner()
    export = _Export(named_tensors, stages[dist.get_rank(group)])
    for name, tensor, is_exported in export:
        if is_owner and not is_first:
            _exchange(dist.isend, tensor, first, group)
        if is_exported:
            yield name, tensor
    if is_owner and is_first:
        for source, specs in zip(others, stages[1:], strict=True):
            for spec in specs:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device())
                _exchange(dist.irecv, tensor, source, group)
                yield spec.name, tensor
    export.raise_error()


def _exchange(operation: Any, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """A batch of one message: on its own it would get an NCCL communicator for its two ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()
