"""RMSNorm of the torch layers: a Triton kernel on a GPU, torch's own elsewhere. Both compute in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyrl_train import kernels


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from skyrl_train.kernels import norm

        # A view if the rows are at equal distances, like the keys in a joint projection.
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out, scale = norm.forward(rows, weight, eps)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from skyrl_train.kernels import norm

        rows, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = norm.backward(grads[0].reshape(rows.shape).contiguous(), rows, weight, scale)
        return grad_x.view(grads[0].shape), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype."""
    if kernels.serve(x):
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
