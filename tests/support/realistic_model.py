"""Small models with the folders of real ones: fields of config.json, several files of weights with an index, a
byte-level tokenizer of 8,000 tokens and the family's chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.realistic import realistic_tokenizer

VOCABULARY = 8000
SHARD_SIZE = "700KB"
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # As Qwen3-1.7B: tied head, norms of queries and keys, heads wider than hidden_size / heads.
    "qwen3": (
        "Qwen3",
        "qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "tie_word_embeddings": True,
        },
    ),
    # As Qwen2.5-1.5B-Instruct: biases of queries, keys and values.
    "qwen2_5": (
        "Qwen2",
        "qwen2_5",
        {
            "hidden_size": 128,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
    ),
    # As Llama-3.2-1B-Instruct.
    "llama3": (
        "Llama",
        "llama3",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3_ROPE,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "tie_word_embeddings": True,
        },
    ),
    # As DeepSeek-V3: multi-latent attention, a dense first layer, routed and shared experts, untied head.
    "deepseek_v3": (
        "DeepseekV3",
        "deepseek_r1",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 64,
            "v_head_dim": 16,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_parameters": YARN,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
        },
    ),
}
"""Name -> transformers' family, the tokenizer's family, fields of config.json."""


def write_realistic_model(name: str, folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write the model of MODELS as a Hugging Face folder with several files of weights; returns the folder."""
    import transformers

    family, template, fields = MODELS[name]
    tokenizer = realistic_tokenizer(template, VOCABULARY)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **fields, **ids, **changes})
    transformers.set_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    return folder
