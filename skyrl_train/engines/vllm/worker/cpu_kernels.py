"""Two of vLLM's CPU kernels that compute something else than their GPU counterparts, replaced by torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


@functools.cache
def replace_cpu_kernels() -> None:
    """Call this before the model is built; it changes nothing on a GPU."""
    _rotate_heads_with_torch()
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _rotate_heads_with_torch() -> None:
    """Replace the rotation of a query [tokens, heads, size], as latent attention passes it.

    The kernel (vLLM 0.32) reads it as [tokens, size], so it rotates the wrong rows of the query and writes beside the
    key.
    """
    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        forward = kernel if query.dim() == positions.dim() + 1 else RotaryEmbedding.forward_native
        return forward(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value for its draft tokens, in speculative decoding: [requests] -> [num_tokens].

    The kernel (vLLM 0.32) fills an integer copy of the result, so temperature, top_p and top_k of draft tokens were
    whatever the memory held. Args: cu_num_tokens: [requests], cumulative; others: a value and what to put for it.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return values.repeat_interleave(counts, output_size=num_tokens)
