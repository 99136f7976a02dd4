"""What Megatron (0.16, 0.19) does once per parameter in every optimizer step, done for all of them at once.

Each weight is copied from float32 into the model by a kernel of its own, and views of buffers are made again, though
they stay valid when a buffer leaves the device. Without Transformer Engine and Apex, the norm of the gradients waits
for the device at each of them. Of an update of Qwen3-30B-A3B's shape with 6 layers, which has 1,600 parameters, all
of that took a tenth on a host with slow cores.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from torch import Tensor


class BufferViews:
    """This rank's parts of Megatron's buffers, in the order of a distributed optimizer's parameters."""

    def __init__(self, optimizer: Any) -> None:
        pairs = [
            *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
        ]
        self._parameters: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._weights: list[Tensor] = []
        for models, parameters in pairs:
            for model, parameter in zip(models, parameters, strict=True):
                ranges = optimizer._get_model_param_range_map(model)
                buffer, _, bucket = optimizer.model_param_gbuf_map[model]
                weights = optimizer.buffers[buffer].buckets[bucket].param_data
                assert model.main_grad.dtype == torch.float32 and ranges["param"].size == parameter.numel()
                self._parameters.append(parameter)
                self._gradients.append(_part(model.main_grad, ranges["param"]))
                self._weights.append(_part(weights, ranges["gbuf_world_in_bucket"]))

    def give_gradients(self) -> None:
        """Megatron's `_copy_model_grads_to_main_grads`."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def copy_weights(self) -> None:
        """Megatron's `_copy_main_params_to_model_params`."""
        if self._weights:
            torch._foreach_copy_(self._weights, self._parameters)


def _part(buffer: Tensor, of: Any) -> Tensor:
    return buffer.view(-1)[of.start : of.end].detach()


def install(optimizer: Any) -> None:
    """Have Megatron's optimizer, of one or several distributed ones, use this module."""
    for part in _parts(optimizer):
        if not part.is_stub_optimizer:
            views = BufferViews(part)
            part._copy_model_grads_to_main_grads = views.give_gradients
            part._copy_main_params_to_model_params = views.copy_weights
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def clip(optimizer: Any, norm: float) -> None:
    """Scale the gradients to Megatron's `clip_grad` where their norm is larger."""
    for part in _parts(optimizer):
        factor = part.config.clip_grad / (norm + 1e-6)
        gradients = [parameter.grad for parameter in part.get_parameters() if parameter.grad is not None]
        if 0.0 < factor < 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


def _l2_norm(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Summed in float64: Megatron's own sums float32 numbers one by one on a CPU. Its norm of 1e7 gradients in one
    tensor was 4e-4 off, of 1.6e8 2 %, so that it depended on the layout, and clipping with it.
    """
    (tensors,) = lists
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return torch.linalg.vector_norm(norms).float().reshape(1), None
