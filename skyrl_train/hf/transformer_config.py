"""Fields of Megatron's TransformerConfig that `transformer_config_kwargs` may not set, or only (OF_CONFIG) to the
value of config.json.

Engines, exports and references compute the model of config.json. Other values in the trainer would train another model
than the one that is sampled from, evaluated and exported. Fields of kernels, precision and dispatch are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from skyrl_train.hf.ledger import names

PINNED = {
    "calculate_per_token_loss": "the gradient would depend on the number of micro-batches and ranks",
    "variable_seq_lengths": "micro-batches differ in length",
    "sequence_parallel": "set megatron_config.sequence_parallel",
    "recompute_granularity": "set megatron_config.recompute_granularity",
    "moe_aux_loss_coeff": "set megatron_config.moe_aux_loss_coeff, the loss of the whole mini-batch",
    "moe_router_load_balancing_type": "set megatron_config.moe_aux_loss_coeff, the loss of the whole mini-batch",
    "moe_z_loss_coeff": "Megatron scales it with the tokens of each micro-batch, so it would depend on the split",
    **dict.fromkeys(
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
        "tokens would be dropped micro-batch by micro-batch, so the gradient would depend on the split",
    ),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps"),
        "the engines' models have no such noise, and two passes over the same tokens would differ",
    ),
    "window_size": "tokens attend to their whole sample",
    "mtp_num_layers": "multi-token-prediction layers are not trained",
    **dict.fromkeys(
        ("batch_p2p_comm", "overlap_p2p_comm"),
        "stages send both directions at once, with virtual stages each on its own; otherwise one of two stages would "
        "take the other's gradients for activations",
    ),
    **{
        f"{size}_parallel_size": f"set megatron_config.{size}_parallel_size"
        for size in (
            "context",
            "expert_model",
            "expert_tensor",
            "pipeline_model",
            "tensor_model",
            "virtual_pipeline_model",
        )
    },
}
"""Fields on which the code relies, and why they are fixed or where to set them."""
OF_FAMILY = names(
    """
    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm
    attention_output_gate experimental_attention_variant gated_linear_unit glu_linear_offset heterogeneous_block_specs
    is_hybrid_model layernorm_zero_centered_gamma linear_attention_freq moe_apply_probs_on_input moe_latent_size
    moe_layer_freq moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_pre_softmax
    moe_router_score_function moe_router_topk_limited_devices moe_shared_expert_gate moe_shared_expert_intermediate_size
    moe_token_dropping mrope_section multi_latent_attention no_rope_freq normalization qk_l2_norm qk_layernorm
    rope_type rotary_interleaved rotary_percent softmax_scale softmax_type window_attn_skip_freq
    beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings
    rotary_scaling_factor
    """
)
"""Fields that follow from the family and several fields of config.json."""
OF_CONFIG = {
    **{name: (name,) for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim")},
    "num_layers": ("num_hidden_layers",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size",),
    "layernorm_epsilon": ("rms_norm_eps",),
    "rotary_base": ("rope_theta",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
}
"""Field -> the field of config.json with its value, by family."""


def pinned_problems(key: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Fields that cannot be set for any model. Args: key: of the fields that are given."""
    for name in given:
        if name in PINNED:
            yield f"{key}.{name} cannot be set: {PINNED[name]}"
        elif name in OF_FAMILY:
            yield (
                f"{key}.{name} cannot be set: it follows from the model's config.json, by which engines and exports "
                "compute. Remove it"
            )


def model_problems(key: str, given: Mapping[str, Any], config: PretrainedConfig, folder: str) -> Iterator[str]:
    """Fields with another value than in the config.json of the model's folder. Args: key: like `pinned_problems`."""
    fields = config.to_dict()
    given_fields = {name: value for name, value in fields.items() if value is not None}
    head_dim = config.hidden_size // config.num_attention_heads
    values = {"head_dim": head_dim} | (fields.get("rope_parameters") or {}) | given_fields
    for name in sorted(given.keys() & OF_CONFIG):
        field = next((field for field in OF_CONFIG[name] if field in values), None)
        if given[name] != (None if field is None else values[field]):
            own = f"no {' or '.join(OF_CONFIG[name])}" if field is None else f"{field} {values[field]}"
            yield (
                f"{key}.{name} is {given[name]}: the config.json of {folder} has {own}, by which engines and exports "
                "compute. Remove it"
            )
