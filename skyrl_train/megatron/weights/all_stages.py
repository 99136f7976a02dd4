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
from skyrl_train.weight_sync.bucket import (
    Bucket,
    TensorSpec,
    fill,
    finish,
    next_tensors,
    num_bytes,
    plan_buckets,
    unpack,
)

NamedTensors = Iterator[tuple[str, Tensor]]
Specs = Sequence[TensorSpec]
TOGETHER_BYTES = 64 << 20
"""The most bytes of several tensors in one broadcast. With one for each of thousands, ranks wait for the host."""


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
    """This rank's export. If it fails, the other ranks, which wait for its tensors, get zeros, and `raise_error` then
    ends the gathering.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        self._named_tensors = named_tensors
        self._error: Exception | None = None

    def next(self, specs: Specs) -> list[Tensor]:
        """Tensors of these specs; only the first of them if the export fails."""
        tensors: list[Tensor] = []
        for spec in specs if self._error is None else ():
            try:
                tensors += next_tensors([spec], self._named_tensors)
            except Exception as error:
                self._error = error
                break
        return tensors

    def end(self) -> None:
        """Run the export to its end, where it is checked."""
        try:
            finish(self._named_tensors)
        except Exception as error:
            self._error = self._error or error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _broadcast(named_tensors: NamedTensors, stages: Sequence[Specs], group: dist.ProcessGroup) -> NamedTensors:
    own, export = dist.get_rank(group), _Export(named_tensors)
    packs = [num_bytes(together) for together in plan_buckets(stages[own], TOGETHER_BYTES) if len(together) > 1]
    buffer = torch.empty(max(packs, default=0), dtype=torch.uint8, device=device())
    for number, (source, specs) in enumerate(zip(dist.get_process_group_ranks(group), stages, strict=True)):
        for together in plan_buckets(specs, TOGETHER_BYTES):
            if number == own:
                tensors = export.next(together)
                dist.broadcast(_packed(together, tensors, buffer), source, group=group)
                yield from zip((spec.name for spec in together), tensors, strict=False)
            else:
                size = together[0].num_bytes if len(together) == 1 else num_bytes(together)
                data = torch.empty(size, dtype=torch.uint8, device=device())
                dist.broadcast(data, source, group=group)
                yield from unpack(Bucket(together, data))
        if number == own:
            export.end()
    export.raise_error()


def _packed(specs: tuple[TensorSpec, ...], tensors: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """The bytes of the tensors, zeros if some are missing. A single tensor, which may be large, is not copied."""
    if len(specs) == 1:
        found = tensors[0] if tensors else torch.zeros(specs[0].shape, dtype=specs[0].dtype, device=device())
        return found.contiguous().view(-1).view(torch.uint8)
    return fill(specs, tensors, buffer).data if len(tensors) == len(specs) else buffer[: num_bytes(specs)].zero_()
