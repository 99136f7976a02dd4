"""Verifies that an export yields the current weights, independently of the export.

Digests compare what was sent with what arrived; a sender that reads stale tensors sends, and digests, stale bytes. But
joining shards, splitting fused rows, renaming and cutting off padding moves 64-bit words and changes none. So the sum
of the words of a tensor's shards, modulo 2**64, is the sum over everything that is exported of it. Shards are read from
the model, not from the export's tasks: results of an earlier export, a tensor under another's name and a missing shard
do not add up. They are read while the export runs, during which no weight changes. What is exported as the very memory
of the model's tensor, end to end, is that tensor, and needs no sum: without tensor parallelism most of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.hf import adapter as peft
from skyrl_train.megatron.lora.adapters import Adapter, Lora
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.weights.export import (
    LiveTensor,
    Read,
    dtype_of_name,
    expert_names,
    export_adapter,
    export_tasks,
    is_stage_owner,
    live_tensors,
    whole_shape,
)
from skyrl_train.megatron.weights.word_sums import WORDS, WordSums
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import name_list

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """One Megatron tensor of this stage, without its values."""

    position: int
    hf_names: tuple[str, ...]
    num_rows: int | None
    """Rows of the whole tensor without the padding of the vocabulary; None if it has none."""
    columns: int | None
    """Columns of a shard; None for vectors."""

    def word_bytes(self, tensor: Tensor) -> int | None:
        """Size of the words that are summed: 8 where every row of a shard is a whole number of them, else None for
        elements. Vectors, which are short and may be sharded anywhere, are summed by element.
        """
        return None if self.columns is None or self.columns * tensor.element_size() % WORD_BYTES else WORD_BYTES


class _Shard(NamedTuple):
    """A live tensor that this rank counts."""

    live: LiveTensor
    entry: _Entry
    num_rows: int | None
    """Rows before the padding of the vocabulary; None if it has none."""

    def read(self, read: Read, dtype: torch.dtype) -> Tensor:
        """What is exported of it."""
        part, wanted = read(self.live.tensor), dtype_of_name(self.entry.hf_names[0], dtype)
        part = part if part.dtype == wanted else part.to(wanted)
        return part if self.num_rows is None else part[: self.num_rows]


class LiveSums:
    """Checks the exports of one model's weights."""

    def __init__(self, model: Model) -> None:
        self.tasks = export_tasks(model)
        self._entries: dict[str, _Entry] = {}
        self._of_hf: dict[str, _Entry] = {}
        for task in self.tasks:
            shape = whole_shape(task)
            for name in task.mcore_names:
                hf_names, tensors = model.bridge._weight_to_hf_format(name, torch.empty(shape, device="meta"))
                padded = sum(tensor.numel() for tensor in tensors) < prod(shape)
                entry = _Entry(
                    len(self._entries),
                    tuple(hf_names),
                    tensors[0].shape[0] if padded else None,
                    task.live.tensor.shape[-1] if task.live.tensor.dim() > 1 else None,
                )
                self._entries[name] = entry
                self._of_hf |= dict.fromkeys(hf_names, entry)
        self._shards = [shard for live in live_tensors(model) if (shard := self._shard(model, live)) is not None]

    def _shard(self, model: Model, live: LiveTensor) -> _Shard | None:
        """None if another rank counts an equal copy."""
        is_expert = live.is_expert
        rank, ep_rank = parallel_state.get_tensor_model_parallel_rank(), 0
        if is_expert:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            ep_rank = parallel_state.get_expert_model_parallel_rank()
        if not _is_first_replica(is_expert) or (rank > 0 and not live.is_sharded):
            return None
        entry, rows = self._entries[expert_names(model, live)[ep_rank]], len(live.tensor)
        first = rank * rows if live.is_sharded else 0
        count = rows if entry.num_rows is None else max(0, entry.num_rows - first)
        return _Shard(live, entry, count if count < rows else None)

    def checked(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        read: Read = lambda tensor: tensor.detach(),
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what `export` yields. A collective over the stage at its end: all its ranks must drain it.
        Args: named_tensors: keep their values until the end; read as in `export`.
        Raises: WeightSyncError at the end, on the stage's owner, naming the tensors whose exported values differ from
            the model's.
        """
        num, left = len(self._entries), {shard.entry.position: shard for shard in self._shards}
        sums = WordSums(2 * num, device())  # of the live tensors, and after them of the exported ones
        is_owner, parts = is_stage_owner(), list[Tensor]()

        def count(shard: _Shard, exported: Sequence[Tensor] = ()) -> bool:
            """Add a live tensor that this rank counts, unless it is what was exported. Returns: whether it is not."""
            live = shard.read(read, dtype)
            if is_added := not _is_memory_of(exported, live):
                sums.add(shard.entry.position, live, shard.entry.word_bytes(live))
            return is_added

        for name, tensor in named_tensors:  # while buckets travel, so that little is left to wait for at the end
            entry = self._of_hf[name]
            parts = [*parts, tensor] if name != entry.hf_names[0] else [tensor]
            if name == entry.hf_names[-1]:
                shard = left.pop(entry.position, None)
                differs = shard is None or count(shard, parts if is_owner else ())
                for part in parts if is_owner and differs else ():
                    sums.add(num + entry.position, part, entry.word_bytes(part))
            yield name, tensor
        for shard in left.values():
            count(shard)
        live, exported = sums.total().view(2, num)
        _require_equal(live, exported, [entry.hf_names for entry in self._entries.values()], "weights")


def _is_memory_of(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the parts are the memory of `whole`, from its start to its end in this order."""
    address = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.dtype != whole.dtype or not part.is_contiguous():
            return False
        address += part.nbytes
    return address == whole.data_ptr() + whole.nbytes and whole.is_contiguous()


def warm_up() -> None:
    """Launch the kernels of the check once, which takes half a second, and connect its ranks. A collective over the
    stage.
    """
    sums = WordSums(1, device())
    for dtype in WORDS.values():
        sums.add(0, torch.zeros(1, dtype=dtype, device=device()))
    _require_equal(sums.total(), sums.total(), [("",)], "weights")


def checked_adapters(lora: Lora, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield what `export_adapter` yields, as `dtype`. A collective over the stage: all its ranks must drain it.
    Raises: WeightSyncError at the end, on the stage's owner, naming the tensors whose exported values differ from the
        model's.
    """
    modules = [name for _, adapter in lora.adapters for group in adapter.site.modules for name in group]
    names = [name for module in modules for name in peft.tensor_names(module)]
    positions = {name: index for index, name in enumerate(names)}
    is_owner, exported = is_stage_owner(), WordSums(len(names), device())
    for name, tensor in export_adapter(lora):
        converted = tensor.to(dtype)
        if is_owner:
            exported.add(positions.pop(name), converted)
        yield name, converted
    assert not (is_owner and positions), f"not exported: {name_list(list(positions))}"
    live = torch.cat([_adapter_sums(adapter, dtype).flatten() for _, adapter in lora.adapters])
    _require_equal(live, exported.total(), [(name,) for name in names], "adapters")


def _adapter_sums(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """[experts of the model (or 1), P, 2] int64: sums over the shards of A and B that this rank counts."""
    site, select = adapter.site, adapter.select.bool()
    sums = torch.zeros(len(site.modules), select.shape[1], 2, dtype=torch.int64, device=select.device)
    if not _is_first_replica(site.is_expert):
        return sums
    first = parallel_state.get_expert_model_parallel_rank() * site.num_local if site.is_expert else 0
    mine = sums[first : first + site.num_local]
    if site.shard_axis == 1 or site.group.rank() == 0:
        mine[:, :, 0] = _elements(adapter.lora_A.to(dtype)).sum((-1, -2))
    if site.shard_axis == 0 or site.group.rank() == 0:
        rows = _elements(adapter.lora_B.to(dtype)).sum(-1)
        mine[:, :, 1] = (rows[:, :, None] * select).sum(1)
    return sums


def _is_first_replica(is_expert: bool) -> bool:
    """Whether this rank's copy of a tensor is the one of equal copies that counts."""
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _require_equal(live: Tensor, exported: Tensor, names: Sequence[tuple[str, ...]], kind: str) -> None:
    """Compare what the stage's ranks hold with what its owner exported. A collective over the stage."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(live, group=group)
    if not is_stage_owner():
        return
    differ = (live != exported).flatten().tolist()
    if wrong := [name for some, is_wrong in zip(names, differ, strict=True) if is_wrong for name in some]:
        raise WeightSyncError(
            f"the export of {len(wrong)} of {sum(map(len, names))} tensors does not yield the current {kind}: "
            f"{name_list(wrong)}"
        )


def _elements(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer, whose sums are int64."""
    return tensor.detach().contiguous().view(WORDS[tensor.element_size()])
