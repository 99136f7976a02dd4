"""Floating-point operations of a training step, for MFU and for balancing ranks. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Weights and attention that one token meets in a forward pass."""

    matrix_weights: int
    """Weights of the matrices that a token passes: of a mixture of experts only the chosen ones; the output layer
    too, the embedding not."""
    attention_width: int
    """Layers x query heads x (size of a key + size of a value): multiply-adds per pair of tokens."""

    def train_flops(self, lengths: Tensor) -> float:
        """FLOPs of forward and backward (2 + 4 per multiply-add) for samples of these lengths [B], causal attention
        counted as half of the square. Recomputed activations are not counted: MFU, not HFU."""
        tokens, squares = float(lengths.sum()), float(lengths.double().square().sum())
        return 6.0 * self.matrix_weights * tokens + 6.0 * self.attention_width * squares / 2

    @property
    def attention_ratio(self) -> float:
        """Cost of a sample of L tokens is L + attention_ratio * L^2, in units of one token's matrices."""
        return self.attention_width / (2 * self.matrix_weights)


def model_cost(config: PretrainedConfig) -> ModelCost:
    """The cost of a Hugging Face model, dense or mixture of experts, with grouped-query or multi-latent attention."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    if getattr(config, "kv_lora_rank", None):
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        q_dim, v_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        query = hidden * q_rank + q_rank * heads * q_dim if q_rank else hidden * heads * q_dim
        key_value = hidden * (kv_rank + config.qk_rope_head_dim) + kv_rank * heads * (config.qk_nope_head_dim + v_dim)
        attention, score_dim = query + key_value + heads * v_dim * hidden, q_dim + v_dim
    else:
        attention = hidden * head_dim * (2 * heads + 2 * config.num_key_value_heads)
        score_dim = 2 * head_dim
    experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    experts = experts or getattr(config, "num_local_experts", None)
    dense = 3 * hidden * config.intermediate_size
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        shared = (getattr(config, "n_shared_experts", 0) or 0) * width
        shared += getattr(config, "shared_expert_intermediate_size", 0) or 0
        sparse = 3 * hidden * (width * config.num_experts_per_tok + shared) + hidden * experts
        kinds = getattr(config, "mlp_layer_types", None)
        num_dense = kinds.count("dense") if kinds else getattr(config, "first_k_dense_replace", 0) or 0
    else:
        sparse, num_dense = 0, layers
    matrices = layers * attention + num_dense * dense + (layers - num_dense) * sparse + hidden * config.vocab_size

    return ModelCost(matrix_weights=matrices, attention_width=layers * heads * score_dim)
