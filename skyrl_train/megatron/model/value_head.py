"""The output layer of a critic: one value per position, in place of logits."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core.bridge import Bridge
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from skyrl_train.device import device
from skyrl_train.hf.checkpoint import opened, tensor_files


class ValueHead(nn.Module):
    """A linear layer from a hidden state to its value in float32. All tensor-parallel ranks have the same weights."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._gathers = config.sequence_parallel
        self.linear = nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype)
        # With sequence parallelism each rank has the gradient of its own positions; Megatron then sums them.
        self.linear.weight.sequence_parallel = self._gathers  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """[S, 1, H] -> [S, 1, 1], of all positions where `hidden` has those of this rank. Megatron expects a bias."""
        values = nn.functional.linear(hidden.float(), self.linear.weight.float())
        if self._gathers:
            # Every rank computes the same loss, so the gradient is cut and not summed.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


@torch.no_grad()
def add_value_head(bridge: Bridge, chunk: GPTModel, folder: str, name: str, seed: int) -> None:
    """Make `NAME.weight` of the checkpoint the output layer of the last stage; if there is none, small random weights.
    Raises: ValueError for a tensor of another shape.
    """
    bridge._DIRECT_MAPPING["output_layer.linear.weight"] = f"{name}.weight"
    if not chunk.post_process:
        return
    head = ValueHead(bridge.config, next(chunk.parameters()).dtype)
    weight = head.linear.weight
    if (file := tensor_files(folder).get(f"{name}.weight")) is None:
        size = bridge.config.hidden_size
        weight.copy_(torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) / (size + 1))
    else:
        with opened(file) as tensors:
            saved = tensors.get_tensor(f"{name}.weight")
        if saved.shape != weight.shape:
            raise ValueError(
                f"trainer.algorithm.value_head_prefix is {name}: {name}.weight in {folder} has the shape "
                f"{list(saved.shape)}, a critic's head has {list(weight.shape)}. Name a head of one output"
            )
        weight.copy_(saved)
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
    chunk.output_layer = head.to(device())
