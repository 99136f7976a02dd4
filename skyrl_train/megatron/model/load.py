"""Hugging Face checkpoint -> weights of Megatron model chunks.

mbridge's own loop creates a state_dict and a set of all names for every tensor. For the 18,867 tensors of Qwen3-30B-A3B
that took longer than everything else at the start of a run together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

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
        for _, in_layer in groupby(hf_names, key=_layer):  # at a time, since a reader may convert what it reads
            of_layer = list(in_layer)
            own = [hf for name in of_layer if groups[name].rank() == 0 for hf in hf_names[name]]
            read = reader.load_some_hf_weight(own)
            for name in of_layer:
                if groups[name].rank() == 0:
                    tensors = {hf: read[hf] for hf in hf_names[name]}
                    _send(held[name], _parts(bridge, name, tensors, held[name], groups[name].size()), groups[name])
                else:
                    _receive(held[name], groups[name])


def _layer(name: str) -> str:
    """Prefix of the names of a layer's tensors, which follow each other."""
    _, layers, rest = name.partition("decoder.layers.")
    return layers + rest.partition(".")[0]


def _parts(bridge: Bridge, name: str, tensors: Mapping[str, Tensor], held: Tensor, count: int) -> Sequence[Tensor]:
    """The part of each rank of one Megatron weight that these tensors of the checkpoint make."""
    whole = bridge._weight_to_mcore_format(name, [tensor.to(device()) for tensor in tensors.values()])
    parts: Sequence[Tensor] = bridge._weight_split_across_tp(name, whole, held, count)
    if parts[0].shape != held.shape:
        sizes = f"{list(parts[0].shape)}, and Megatron's has {list(held.shape)}"
        raise ValueError(f"{', '.join(tensors)} in the checkpoint make a part of the shape {sizes}")
    return parts


def _send(held: Tensor, parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    held.copy_(parts[0])
    if group.size() > 1:
        alike = [part.to(held.dtype).contiguous() for part in parts]
        dist.scatter(torch.empty_like(held), alike, src=dist.get_global_rank(group, 0), group=group)


def _receive(held: Tensor, group: dist.ProcessGroup) -> None:
    part = torch.empty_like(held)
    dist.scatter(part, None, src=dist.get_global_rank(group, 0), group=group)
    held.copy_(part)
