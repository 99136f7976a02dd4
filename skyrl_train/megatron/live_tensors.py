"""The tensors of a rank's model that are exported: found once, read whenever they are asked for.

Walking a model of 36 layers and naming what is in it takes half of the host's time for an export. Names never change
while a process lives; what a module holds under its own name does, and is looked up each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mbridge.core.bridge import Bridge
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A parameter (or buffer that is exported) of this rank."""

    module: torch.nn.Module
    """Whose it is."""
    attribute: str
    """Under which it is there."""
    local_name: str
    name: str
    """In the whole model, except that experts count from 0 on every rank."""

    @property
    def tensor(self) -> torch.nn.Parameter | Tensor:
        """What the module holds now."""
        return getattr(self.module, self.attribute)  # type: ignore[no-any-return]

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts.linear_fc" in self.local_name

    @property
    def is_cut(self) -> bool:
        """Tensor parallelism gave this rank a part of it."""
        return bool(getattr(self.tensor, "tensor_model_parallel", False))


def find_live_tensors(modules: Sequence[torch.nn.Module], bridge: Bridge) -> list[LiveTensor]:
    """What is exported of this rank's GPTModels, in layer order; a tied output layer is left to the embedding."""
    tied = getattr(bridge.hf_config, "tie_word_embeddings", False)
    found = []
    for module in modules:
        names = bridge._weight_name_mapping_mcore_local_to_global(module, consider_ep=False)
        local_names = [name for name, _ in module.named_parameters()]
        local_names += [name for name, _ in module.named_buffers() if name.endswith("expert_bias")]
        for local_name in local_names:
            # Adapters are sent by lora_export.py, or `read` folds them into the weights.
            if not (tied and local_name == "output_layer.weight") and ".lora." not in local_name:
                path, _, attribute = local_name.rpartition(".")
                found.append(LiveTensor(module.get_submodule(path), attribute, local_name, names[local_name]))
    return found
