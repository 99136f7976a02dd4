"""The output layer of a language model, whose product with the hidden states is left to `passes/head.py`."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor


def return_hidden_states(chunk: GPTModel) -> None:
    """Make the last stage return hidden states [1, S, H] instead of logits: with sequence parallelism those of this
    rank's positions.

    The layer keeps its weight and is still called, so that forward hooks of Megatron's data-parallel wrapper run.
    """
    if chunk.post_process:
        chunk.output_layer.forward = _hidden_states


def _hidden_states(hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
    """Megatron expects a bias besides."""
    return hidden, None


def output_weight(chunk: GPTModel) -> Tensor:
    """[V / tp, H] of the last stage's output layer, with padding rows."""
    tied = chunk.share_embeddings_and_output_weights
    weight: Tensor = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    return weight
