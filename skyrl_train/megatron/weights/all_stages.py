"""The weights of all pipeline stages on every rank.

Usually each stage sends its own (export.py). Receivers that accept only one sender, or that share a GPU with one rank
each, need all of them from it, at the cost of one more copy of the other stages' weights over the trainer's network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.weights.gather import gather_json
from skyrl_train.weight_sync.bucket import TensorSpec

NamedTensors = Iterator[tuple[str, Tensor]]
Specs = Sequence[TensorSpec]


def specs_by_stage(specs: Specs) -> list[list[TensorSpec]]:
    """Specs of all stages. A collective over all ranks. Args: those of this rank's stage."""
    messages = gather_json([spec.to_message() for spec in specs], parallel_state.get_pipeline_model_parallel_group())
    return [[TensorSpec.from_message(message) for message in stage] for stage in messages]


def to_every_stage(stages: Sequence[Specs], named_tensors: NamedTensors) -> NamedTensors:
    """Tensors of all stages, stage after stage. Draining them is a collective over all ranks.

    Args: stages: `specs_by_stage`; named_tensors: what this rank's stage exports.
    """
    if len(stages) == 1:
        return named_tensors
    return _broadcast(named_tensors, stages, parallel_state.get_pipeline_model_parallel_group())


class _Export:
    """This rank's export. If it fails, zeros replace the missing tensors, because the other ranks wait for them;
    `raise_error` then ends the gathering.
    """

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
