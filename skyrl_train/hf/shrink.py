"""A small version of a model configuration: the same computation in a few hundred kilobytes.

Width, depth, the number of experts and the vocabulary shrink. Everything else stays: head size and lengths, on which
rotary embeddings depend, grouped key-value heads, query latents, every kind of layer, groups of experts and experts per
token.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCABULARY = 131
"""Not a multiple of any parallel size."""
WINDOW = 8
"""Tokens of a sliding window, so that it affects short samples."""
SHORT = 16
"""Original length of rotary embeddings that change beyond it, so that short samples exceed it."""
PER_LAYER = ("layer_types", "mlp_layer_types")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "n_shared_experts": 2,
}
LEFT_OUT = (
    "quantization_config",
    "transformers_version",
    "architectures",
    "dtype",
    "num_nextn_predict_layers",
    "_name_or_path",  # a folder: a check that passed counts for the same model in every folder
)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The small configuration of the same family."""
    values = config.to_dict()
    small = values | {name: min(size, values[name]) for name, size in SMALL.items() if values.get(name)}
    small |= _heads(values) | _layers(values) | _experts(values) | _lengths(values) | _tokens(values)
    for name in LEFT_OUT:
        small.pop(name, None)
    return AutoConfig.for_model(small.pop("model_type"), **small)


def _heads(values: dict[str, Any]) -> dict[str, Any]:
    heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads") or values["num_attention_heads"]
    if values.get("kv_lora_rank"):
        few = min(2, heads)
        return {"num_attention_heads": few, "num_key_value_heads": few if kv_heads == heads else kv_heads}
    kv_few = min(2, kv_heads)
    few = kv_few * min(2, max(1, heads // kv_heads))
    small: dict[str, Any] = {"num_attention_heads": few, "num_key_value_heads": kv_few}
    if values.get("head_dim") is None:
        small["hidden_size"] = few * (values["hidden_size"] // heads)
    return small


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """Two layers of each kind, in their order."""
    num_layers = values["num_hidden_layers"]
    lists = {name: values[name] for name in PER_LAYER if values.get(name)}
    bounds = {name: values[name] for name in ("first_k_dense_replace", "max_window_layers") if values.get(name)}
    dense = set(values.get("mlp_only_layers") or ())
    kinds: dict[Any, list[int]] = {}
    for layer in range(num_layers):
        kind = (
            *(each[layer] for each in lists.values()),
            *(layer < bound for bound in bounds.values()),
            layer in dense,
        )
        kinds.setdefault(kind, []).append(layer)
    chosen = sorted(layer for layers in kinds.values() for layer in layers[:2])
    return {
        "num_hidden_layers": len(chosen),
        **{name: [each[layer] for layer in chosen] for name, each in lists.items()},
        **{name: sum(layer < bound for layer in chosen) for name, bound in bounds.items()},
        **({"mlp_only_layers": [new for new, layer in enumerate(chosen) if layer in dense]} if dense else {}),
    }


def _experts(values: dict[str, Any]) -> dict[str, Any]:
    chosen, groups = values.get("num_experts_per_tok") or 1, values.get("n_group") or 1
    enough = groups * max(4, -(-2 * chosen // groups))
    return {name: min(values[name], enough) for name in EXPERTS if values.get(name)}


def _lengths(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = (
        {"sliding_window": min(WINDOW, values["sliding_window"])} if values.get("sliding_window") else {}
    )
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        small["rope_parameters"] = rope | {"original_max_position_embeddings": SHORT}
        small["max_position_embeddings"] = SHORT
    return small


def _tokens(values: dict[str, Any]) -> dict[str, Any]:
    """The padding token keeps its position relative to the end of the vocabulary."""
    size = min(VOCABULARY, values["vocab_size"])
    small: dict[str, Any] = {"vocab_size": size, "bos_token_id": None, "eos_token_id": None}
    padding = values.get("pad_token_id")
    if padding is not None and padding >= 0:
        small["pad_token_id"] = size - 1 if padding < values["vocab_size"] else size + padding - values["vocab_size"]
    return small
