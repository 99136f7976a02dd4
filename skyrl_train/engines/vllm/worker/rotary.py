"""Rotary positions of latent attention without a GPU."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


@functools.cache
def rotate_heads_with_torch() -> None:
    """Replace vLLM's CPU kernel for a query [tokens, heads, size], as latent attention passes it.

    The kernel (vLLM 0.32) reads it as [tokens, size], so it rotates the wrong rows of the query and writes beside the
    key. Call this before the model is built.
    """
    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        forward = kernel if query.dim() == positions.dim() + 1 else RotaryEmbedding.forward_native
        return forward(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]
