"""Hugging Face checkpoint -> weights of Megatron model chunks.

mbridge's own loop creates a state_dict and a set of all names for every tensor. For the 18,867 tensors of Qwen3-30B-A3B
that took longer than everything else at the start of a run together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from mbridge.core.bridge import Bridge
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.weights.gather import shard_group


@torch.no_grad()
def load_weights(bridge: Bridge, chunks: Sequence[GPTModel], folder: str) -> None:
    """Fill this rank's part of the model. The first rank of each group that shares a weight reads it and sends the
    others their parts: a collective over the tensor and expert-tensor groups.

    Raises: ValueError if a tensor has another shape than Megatron's.
    """
    reader = bridge._get_safetensor_io(folder)
    for chunk in chunks:
        held = chunk.state_dict()
        global_names = bridge._weight_name_mapping_mcore_local_to_global(chunk)
        hf_names = {name: bridge._weight_name_mapping_mcore_to_hf(of) for name, of in global_names.items()}
        groups = {name: shard_group(is_expert=".mlp.experts.linear_fc" in name) for name in hf_names}
        own = [hf for name, names in hf_names.items() if groups[name].rank() == 0 for hf in names]
        read = reader.load_some_hf_weight(own)
        for name, names in hf_names.items():
            group = groups[name]
            if group.rank() != 0:
                _receive(held[name], group)
                continue
            whole = bridge._weight_to_mcore_format(name, [read[hf].to(device()) for hf in names])
            parts = bridge._weight_split_across_tp(name, whole, held[name], group.size())
            if parts[0].shape != held[name].shape:
                sizes = f"{list(parts[0].shape)}, and {list(held[name].shape)} of the model"
                raise ValueError(f"{folder}: {', '.join(names)} make a part of the shape {sizes}")
            _send(held[name], parts, group)


def _send(held: Tensor, parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    held.copy_(parts[0])
    if group.size() > 1:
        alike = [part.to(held.dtype).contiguous() for part in parts]
        dist.scatter(torch.empty_like(held), alike, src=dist.get_global_rank(group, 0), group=group)


def _receive(held: Tensor, group: dist.ProcessGroup) -> None:
    part = torch.empty_like(held)
    dist.scatter(part, None, src=dist.get_global_rank(group, 0), group=group)
    held.copy_(part)
