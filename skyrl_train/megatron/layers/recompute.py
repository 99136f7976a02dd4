"""Selective recomputation of cheap outputs: of norms and SwiGLU in front of matrix products.

The product needs its input for the gradient of its weight. With Qwen3-4B's sizes these inputs are 27 % of what a dense
layer saves per token (two norms and the activation, 29.7 of 109.7 kB in half precision). A kernel computes them again,
with the same bits, from tensors that are saved anyway. Megatron has the first and the last name too, but its version
needs Transformer Engine, and does not cover norms that are part of a linear layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

NORMS, SWIGLU, EXPERT_SWIGLU = CHEAP = ("layernorm", "mlp_act", "moe_act")
"""Names in recompute_modules: norms that are part of a linear layer, activations of dense layers and of experts."""


def recompute_cheap(config: TransformerConfig, modules: Collection[str]) -> None:
    """Have the torch layers that are built with `config` recompute `modules`, names of CHEAP."""
    config.cheap_recomputation = frozenset(modules)


def recomputes(config: TransformerConfig, module: str) -> bool:
    return module in getattr(config, "cheap_recomputation", ())


@contextlib.contextmanager
def unsaved(tensor: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Let operations in the body save `compute`, which returns the same values again, where they save `tensor`."""
    address, shape = tensor.data_ptr(), tensor.shape

    def pack(saved: Tensor) -> Any:
        return compute if saved.data_ptr() == address and saved.shape == shape else saved

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def unsaved_activation(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """`unsaved` for an output of `swiglu.py`, which says how to compute it again; nothing for another tensor."""
    compute = getattr(x, "again", None)
    return contextlib.nullcontext() if compute is None else unsaved(x, compute)
