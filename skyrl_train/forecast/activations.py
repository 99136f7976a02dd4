"""Bytes that the layers of megatron/layers/ keep for the backward pass, for each token of a micro-batch on a rank.

Counted from the functions: tensors that autograd saves, once per storage. Transformer Engine's layers keep the same but
for one copy of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from skyrl_train.config.policy import Layout
from skyrl_train.forecast.adapters import AdaptedLayer, change
from skyrl_train.hf import matrices
from skyrl_train.hf.matrices import Layer

FLOAT32 = 4
INDEX = 8
ROUTER_COPIES = 3
"""Float32 tensors [T, E] of a router: logits, scores, routing weights."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes per token of a rank's micro-batch."""

    layer: float
    """A layer keeps between its forward and its backward pass."""
    working: float
    """A layer needs besides while its backward pass runs, with what it recomputes for that."""
    fixed: float = 0.0
    """Bytes that a layer keeps of a micro-batch, whatever its tokens."""


def kept(config: PretrainedConfig, layer: Layer, layout: Layout, width: int) -> Kept:
    """Args: width: bytes of an element of activations."""
    if isinstance(layer, AdaptedLayer) and not layer.is_reached:
        return Kept(0.0, 0.0)
    modules, is_adapted = layout.megatron.recomputed, isinstance(layer, AdaptedLayer)
    stream = config.hidden_size * width / layout.sp
    changes = [change(config, layer, layout, width, in_attention=part) for part in (True, False)]
    attention = 2 * stream + _attention(config, layout, width) + changes[0].per_token
    mlp, gradients = _mlp(config, layer, layout, width)
    mlp, fixed = mlp + changes[1].per_token, changes[0].fixed + changes[1].fixed
    again = 0.0
    if "core_attn" in modules:
        attention -= _log_sums(config, layout)
    is_torch = layout.megatron.transformer_impl != "transformer_engine"
    if layer.is_sparse and "moe_act" in modules and not _keeps_activation(layer):
        again += _activation(config, layout, width)
    if not layer.is_sparse and "mlp_act" in modules and not is_adapted:
        again += config.intermediate_size * width / layout.tp
    if "layernorm" in modules and not (is_adapted and is_torch):  # an adapter keeps these inputs, or nothing does
        # One of a mixture's norms, and with the torch layers those in front of projections.
        again += stream if layer.is_sparse else 2 * stream if is_torch else 0.0
    held = _held_routing(config, layout, width) if layer.is_sparse else 0.0
    if ("moe" if layer.is_sparse else "mlp") in modules:
        again, fixed = max(again, mlp + stream - held), changes[0].fixed
    whole = attention + 2 * stream + mlp
    if layout.megatron.recompute == "full":
        return Kept(stream + held, whole - stream - held + gradients)
    return Kept(whole - again, again + gradients, fixed)


def weight_gradient_bytes(layer: Layer, layout: Layout, width: int) -> float:
    """Bytes of the half-precision gradients of the largest weights of a layer, before they are added in float32; with
    adapters those of the largest padded B, and itself.
    """
    if isinstance(layer, AdaptedLayer):
        return 2 * max((site.padded(layout) for site in layer.sites), default=0) * width
    largest = max(layer.mlp, key=lambda matrix: matrix.size * matrix.count)
    if layer.is_sparse:
        return 2 * largest.size * largest.count / (layout.ep * layout.etp) * width  # gate and up together
    return 2 * largest.size / layout.tp * width


def _attention(config: PretrainedConfig, layout: Layout, width: int) -> float:
    """Between the norm's output and the output projection."""
    query_size, value_size = matrices.head_sizes(config)
    query = config.num_attention_heads * query_size * width / layout.tp
    output = config.num_attention_heads * value_size * width / layout.tp
    if matrices.is_latent(config):
        # Latents and their norms; queries and keys before and after rotation, values, output.
        latents = 2 * ((config.q_lora_rank or 0) + config.kv_lora_rank) + config.qk_rope_head_dim
        return latents * width + 4 * query + 3 * output + _log_sums(config, layout)
    keys = max(config.num_key_value_heads / layout.tp, 1.0) * query_size * width
    joint = query + 2 * keys
    copied = query if matrices.has_qk_norm(config) and layout.megatron.transformer_impl != "transformer_engine" else 0.0
    total = joint + copied + query + keys + output + _log_sums(config, layout)
    if layout.cp > 1:
        # Keys and values of both halves, up to their ends; each half has its own queries, and its output is reordered.
        total += (2 * layout.cp + 1) / 2 * 2 * keys - keys + output
    return total


def _log_sums(config: PretrainedConfig, layout: Layout) -> float:
    return FLOAT32 * config.num_attention_heads / layout.tp


def _mlp(config: PretrainedConfig, layer: Layer, layout: Layout, width: int) -> tuple[float, float]:
    """Kept bytes from the norm's output to the layer's, and those of the gradients that exist at the same time."""
    hidden = config.hidden_size * width
    if not layer.is_sparse:
        inner = config.intermediate_size * width / layout.tp
        return 3 * inner, 3 * inner + 2 * hidden / layout.sp
    rows = config.num_experts_per_tok * layout.etp / layout.sp
    inner = matrices.expert_width(config) * width / layout.etp
    experts = rows * (hidden + 3 * inner + 2 * INDEX + FLOAT32)
    router = matrices.num_experts(config) * (ROUTER_COPIES * FLOAT32 + 1) / layout.sp
    shared = 3 * matrices.shared_width(config) * width / layout.tp
    return experts + router + shared, rows * (2 * hidden + 3 * inner)


def _held_routing(config: PretrainedConfig, layout: Layout, width: int) -> float:
    """Megatron's dispatcher holds routing weights, map and permutation until the layer's next forward pass."""
    of_experts, of_rows = matrices.num_experts(config) * (width + 1), 2 * INDEX * config.num_experts_per_tok
    return (of_experts + of_rows + INDEX) / layout.sp


def _keeps_activation(layer: Layer) -> bool:
    """Whether adapters keep the inputs of the experts' last matrices."""
    if not isinstance(layer, AdaptedLayer) or layer.drops:
        return False
    return any(site.is_expert and site.is_row for site in layer.sites)


def _activation(config: PretrainedConfig, layout: Layout, width: int) -> float:
    rows = config.num_experts_per_tok * layout.etp / layout.sp
    return rows * matrices.expert_width(config) * width / layout.etp
