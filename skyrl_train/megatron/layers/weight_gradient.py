"""Gradients of the weights of Megatron's linear layers, added to its float32 buffer by the matrix product itself."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class WeightGradient:
    """Replaces Apex's `fused_weight_gradient_mlp_cuda`: adds gradients of weights to Megatron's float32 buffer.

    Without Apex (`gradient_accumulation_fusion`) every micro-batch writes a half-precision gradient, and another kernel
    adds it to the buffer. torch offers cuBLAS's own accumulation.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] += grad [T, out]^T @ x [T, in]; float32, products in the dtype of x."""
        if x.dtype == main_grad.dtype:
            main_grad.addmm_(grad.t(), x)
        elif x.is_cuda:
            torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)
        else:
            main_grad.add_(grad.t() @ x)


@functools.cache
def install() -> None:
    """Make Megatron's linear layers of this process use `WeightGradient`."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = WeightGradient
    layers._grad_accum_fusion_available = True
