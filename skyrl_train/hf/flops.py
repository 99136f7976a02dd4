"""Floating-point operations of a training step, for MFU and for balancing ranks. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from skyrl_train.hf.matrices import head_sizes, layers


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Weights and attention of a token's forward pass."""

    matrix_weights: int
    """Weights of the matrices that a token is multiplied with: chosen experts and output layer, not the embedding."""
    attention_width: int
    """Layers x query heads x (size of a key + size of a value): multiply-adds per pair of tokens."""

    def train_flops(self, lengths: Tensor) -> float:
        """FLOPs of forward and backward (2 + 4 per multiply-add) for samples of these lengths [B], causal attention
        counted as half of the square. Recomputed activations are not counted: MFU, not HFU.
        """
        tokens, squares = float(lengths.sum()), float(lengths.double().square().sum())
        return 6.0 * self.matrix_weights * tokens + 6.0 * self.attention_width * squares / 2

    @property
    def attention_ratio(self) -> float:
        """Cost of a sample of L tokens is L + attention_ratio * L^2, in units of one token's matrices."""
        return self.attention_width / (2 * self.matrix_weights)


def model_cost(config: PretrainedConfig) -> ModelCost:
    """The cost of a Hugging Face model, dense or mixture of experts, with grouped-query or multi-latent attention."""
    costs, output = matrix_weights(config)
    score_dim = sum(head_sizes(config))
    return ModelCost(
        matrix_weights=sum(costs) + output, attention_width=len(costs) * config.num_attention_heads * score_dim
    )


def matrix_weights(config: PretrainedConfig) -> tuple[list[int], int]:
    """Weights that a token is multiplied with in each layer, and in the output layer."""
    return [layer.used_weights for layer in layers(config)], config.hidden_size * config.vocab_size
