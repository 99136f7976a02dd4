"""Does an export yield the weights as they are now? Asked of the live parameters, on a way of its own.

Digests compare what was sent with what arrived; a sender that reads stale tensors sends, and digests, stale bytes. Now
what an export does to a tensor (join shards, split fused rows, give them other names, cut off padding) moves its 64-bit
words and changes none. So the sum of the words of all its shards, modulo 2**64, is the sum over everything exported of
it. Shards are read from the model, not from the export's tasks: what an earlier export left behind does not add up, nor
does a tensor under another's name, or a shard that is missing.

Measured on one core: 2.6 times as fast as the digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.weights.export import (
    Read,
    dtype_of_name,
    expert_names,
    is_stage_owner,
    live_tensors,
    whole_shape,
)
from skyrl_train.megatron.weights.export import export_tasks as plan_tasks
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import name_list

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of one Megatron tensor of this stage, whatever its values."""

    position: int
    hf_names: tuple[str, ...]
    num_rows: int | None
    """Of the whole tensor without the padding of the vocabulary; None where it has none."""
    columns: int | None
    """Of a shard; None for vectors."""


class LiveSums:
    """Checks the exports of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._entries: dict[str, _Entry] = {}
        self._of_hf: dict[str, _Entry] = {}
        for task in plan_tasks(model):
            shape = whole_shape(task)
            for name in task.mcore_names:
                hf_names, tensors = model.bridge._weight_to_hf_format(name, torch.empty(shape, device="meta"))
                padded = sum(tensor.numel() for tensor in tensors) < prod(shape)
                entry = _Entry(
                    len(self._entries),
                    tuple(hf_names),
                    tensors[0].shape[0] if padded else None,
                    task.tensor.shape[-1] if task.tensor.dim() > 1 else None,
                )
                self._entries[name] = entry
                self._of_hf |= dict.fromkeys(hf_names, entry)

    def checked(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        read: Read = lambda tensor: tensor.detach(),
    ) -> Iterator[tuple[str, Tensor]]:
        """Hand on what `export` yields. A collective over the stage at its end: all its ranks must drain it.

        Args: read as in `export`.
        Raises: WeightSyncError at the end, on the stage's owner, naming the tensors that are not the model's.
        """
        is_owner = is_stage_owner()
        sums = _Sums(len(self._entries))
        for name, tensor in named_tensors:
            if is_owner:
                entry = self._of_hf[name]
                sums.add(entry.position, _word_sum(tensor, entry))
            yield name, tensor
        device = next(self._model.modules[0].parameters()).device
        live = self._live(dtype, read).total(device)
        dist.all_reduce(live, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        if is_owner:
            differing = set((live != sums.total(device)).nonzero().flatten().tolist())
            wrong = [name for e in self._entries.values() if e.position in differing for name in e.hf_names]
            if wrong:
                raise WeightSyncError(
                    f"the export of {len(wrong)} of {len(self._of_hf)} tensors does not yield the model's weights of "
                    f"this moment: {name_list(wrong)}"
                )

    def _live(self, dtype: torch.dtype, read: Read) -> _Sums:
        """Sums over the shards that this rank counts: of equal copies one rank counts its own."""
        sums = _Sums(len(self._entries))
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        etp_rank = parallel_state.get_expert_tensor_parallel_rank()
        is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        is_first_expert_replica = parallel_state.get_expert_data_parallel_rank() == 0
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        for one in live_tensors(self._model):
            names = expert_names(self._model, one)
            entry = self._entries[names[ep_rank if one.is_expert else 0]]
            rank, is_counted = (etp_rank, is_first_expert_replica) if one.is_expert else (tp_rank, is_first_replica)
            if is_counted and (one.is_cut or rank == 0):
                part = read(one.tensor).to(dtype_of_name(entry.hf_names[0], dtype))
                if entry.num_rows is not None:
                    first = rank * len(part) if one.is_cut else 0
                    part = part[: max(0, entry.num_rows - first)]
                sums.add(entry.position, _word_sum(part, entry))
        return sums


class _Sums:
    """Sums by the position of their entry, added up at the end: per tensor a GPU is asked for one kernel."""

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._positions: list[int] = []
        self._values: list[Tensor] = []

    def add(self, position: int, value: Tensor) -> None:
        self._positions.append(position)
        self._values.append(value)

    def total(self, device: torch.device) -> Tensor:
        """[entries] int64"""
        zeros = torch.zeros(self._num_entries, dtype=torch.int64, device=device)
        if not self._values:
            return zeros
        return zeros.index_add_(0, torch.tensor(self._positions, device=device), torch.stack(self._values))


def _word_sum(tensor: Tensor, entry: _Entry) -> Tensor:
    """[] int64. Whole words where no shard's row ends within one, else one element at a time (vectors: they are short,
    and are cut anywhere)."""
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    if entry.columns is not None and entry.columns * size % WORD_BYTES == 0:
        if flat.storage_offset() * size % WORD_BYTES:
            flat = flat.clone()
        return flat.view(torch.int64).sum()
    return flat.view({2: torch.int16, 4: torch.int32}[size]).sum(dtype=torch.int64)
