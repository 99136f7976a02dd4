"""Floating-point operations of a training step, for MFU and for balancing ranks. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig


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
    layers, output = matrix_weights(config)
    score_dim = _attention(config)[1]
    return ModelCost(
        matrix_weights=sum(layers) + output, attention_width=len(layers) * config.num_attention_heads * score_dim
    )


def matrix_weights(config: PretrainedConfig) -> tuple[list[int], int]:
    """Weights that a token is multiplied with in each layer, and in the output layer."""
    hidden = config.hidden_size
    attention = _attention(config)[0]
    mlps = {"dense": 3 * hidden * config.intermediate_size, "sparse": _sparse(config)}
    layers = [attention + mlps[kind] for kind in _kinds(config)]
    return layers, hidden * config.vocab_size


def _attention(config: PretrainedConfig) -> tuple[int, int]:
    """Weights of a layer's attention, and size of a key + size of a value."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        q_dim, v_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        query = hidden * q_rank + q_rank * heads * q_dim if q_rank else hidden * heads * q_dim
        key_value = hidden * (kv_rank + config.qk_rope_head_dim) + kv_rank * heads * (config.qk_nope_head_dim + v_dim)
        return query + key_value + heads * v_dim * hidden, q_dim + v_dim
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return hidden * head_dim * (2 * heads + 2 * config.num_key_value_heads), 2 * head_dim


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer; 0 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


def _sparse(config: PretrainedConfig) -> int:
    """Weights of a token's experts, shared ones included, and of their router."""
    experts = num_experts(config)
    if not experts:
        return 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = (getattr(config, "n_shared_experts", 0) or 0) * width
    shared += getattr(config, "shared_expert_intermediate_size", 0) or 0
    return 3 * config.hidden_size * (width * config.num_experts_per_tok + shared) + config.hidden_size * experts


def _kinds(config: PretrainedConfig) -> list[str]:
    """Kind of each layer's MLP: "dense" or "sparse" (a mixture of experts)."""
    layers = config.num_hidden_layers
    if not num_experts(config):
        return ["dense"] * layers
    if kinds := getattr(config, "mlp_layer_types", None):
        return list(kinds)
    first = getattr(config, "first_k_dense_replace", 0) or 0
    return ["dense"] * first + ["sparse"] * (layers - first)
