"""Are the adapters that leave for the engines those of this moment? Asked of the live parameters, as live_sums.py asks
it of weights: joining shards and splitting fused rows moves numbers and changes none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.hf import adapter
from skyrl_train.megatron.lora.adapters import Adapter, Lora
from skyrl_train.megatron.weights.export import is_stage_owner
from skyrl_train.megatron.weights.lora_export import export_adapter
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import name_list


def checked_adapters(lora: Lora, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield what `export_adapter` does, as `dtype`. A collective over the stage: all its ranks must drain it.

    Raises: WeightSyncError at the end, on the stage's owner, naming the tensors that are not the model's.
    """
    modules = [name for _, one in lora.adapters for group in one.site.modules for name in group]
    names = [name for module in modules for name in adapter.tensor_names(module)]
    is_owner, sent = is_stage_owner(), dict[str, Tensor]()
    for name, tensor in export_adapter(lora):
        converted = tensor.to(dtype)
        if is_owner:
            sent[name] = _words(converted).sum()
        yield name, converted
    live = torch.cat([_live(one, dtype).flatten() for _, one in lora.adapters])
    dist.all_reduce(live, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    if not is_owner:
        return
    assert sent.keys() == set(names), sorted(sent.keys() ^ set(names))[:4]
    differing = live != torch.stack([sent[name] for name in names])
    if wrong := [names[index] for index in differing.nonzero().flatten().tolist()]:
        raise WeightSyncError(
            f"the export of {len(wrong)} of {len(names)} tensors does not yield the adapters of this moment: "
            f"{name_list(wrong)}"
        )


def _live(one: Adapter, dtype: torch.dtype) -> Tensor:
    """[experts of the model (or 1), P, 2] int64: sums over what this rank counts; of equal copies one rank counts its
    own."""
    site, select = one.site, one.select.bool()
    sums = torch.zeros(len(site.modules), select.shape[1], 2, dtype=torch.int64, device=select.device)
    is_first_replica = (
        parallel_state.get_expert_data_parallel_rank()
        if site.is_expert
        else parallel_state.get_data_parallel_rank(with_context_parallel=True)
    ) == 0
    if not is_first_replica:
        return sums
    first = parallel_state.get_expert_model_parallel_rank() * site.num_local if site.is_expert else 0
    mine = sums[first : first + site.num_local]
    if site.shard_axis == 1 or site.group.rank() == 0:
        mine[:, :, 0] = _words(one.lora_A.to(dtype)).sum((-1, -2))
    if site.shard_axis == 0 or site.group.rank() == 0:
        rows = _words(one.lora_B.to(dtype)).sum(-1)
        for part in range(select.shape[1]):
            mine[:, part, 1] = rows[:, select[:, part]].sum(-1)
    return sums


def _words(tensor: Tensor) -> Tensor:
    """The bits of each number as an integer, int64."""
    flat = tensor.detach().contiguous()
    return flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()]).long()
