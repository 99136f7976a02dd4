"""SwiGLU in place of Megatron's: one Triton kernel on a GPU and the plain formula elsewhere. Megatron's fused version
is compiled by torch.compile in every process, again for new shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyrl_train import kernels


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        from skyrl_train.kernels import swiglu

        x = x.contiguous()
        ctx.save_for_backward(x, weights)
        return swiglu.forward(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        from skyrl_train.kernels import swiglu

        x, weights = ctx.saved_tensors
        return swiglu.backward(grads[0].contiguous(), x, weights)


def swiglu(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x [..., 2F] = [gate | up], times the weight of each row -> [..., F] in x's dtype.
    Args: weights: one per row of x, of any shape, or None.
    """
    if not kernels.serve(x):
        gate, up = x.chunk(2, -1)
        out = F.silu(gate) * up
        return out if weights is None else (out * weights.reshape(*x.shape[:-1], 1)).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    out = _SwiGLU.apply(rows, None if weights is None else weights.reshape(-1).contiguous())
    return out.view(*x.shape[:-1], -1)


def _bias_swiglu(x: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    assert bias is None, "the bridges build layers without bias"
    return _with_recipe(swiglu(x), x)


def _weighted_bias_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *_: Any) -> Tensor:
    assert bias is None, "the bridges build experts without bias"
    return _with_recipe(swiglu(x, weights), x, weights.detach())


def _with_recipe(out: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
    """The output of swiglu(x, *rest), with how to compute it again (recompute.py)."""
    if torch.is_grad_enabled():
        out.again = functools.partial(swiglu, x.detach(), *rest)  # type: ignore[attr-defined]
    return out


@functools.cache
def install() -> None:
    """Make Megatron's layers call these if `bias_activation_fusion` is set."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import experts, shared_experts

    mlp.bias_swiglu_impl = shared_experts.bias_swiglu_impl = _bias_swiglu
    mlp.weighted_bias_swiglu_impl = experts.weighted_bias_swiglu_impl = _weighted_bias_swiglu
