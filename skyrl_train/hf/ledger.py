"""The fields of a config.json, by model family: used, without effect on training, or refused with their value.

Any other field is refused by its name, so a field that a publisher adds is never ignored. That the used fields are
computed correctly is checked with each model (megatron/verify/model_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Only:
    """Supported values of a field."""

    values: tuple[Any, ...]
    why: str
    """Reason why other values are refused."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Fields of one family, in addition to those of all families."""

    used: frozenset[str]
    only: Mapping[str, Only] = field(default_factory=dict)
    rope_types: frozenset[str] = frozenset({"default", "linear", "llama3", "yarn"})
    rope_fields: frozenset[str] = frozenset()
    """Fields of `rope_parameters`, in addition to those of all families."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


USED = _names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps tie_word_embeddings pad_token_id rope_parameters rope_scaling rope_theta"
)
"""Fields that every family uses. transformers reads the last two into rope_parameters."""

NO_EFFECT = _names(
    # Descriptions of the file.
    "_name_or_path _commit_hash transformers_version auto_map dtype torch_dtype unsloth_fixed unsloth_version "
    "tokenizer_class name_or_path _attn_implementation_autoset transformers.js_config is_llama_config "
    # Generation and the text of a task, which belong to the tokenizer, the engine and the data.
    "bos_token_id eos_token_id sep_token_id decoder_start_token_id use_cache id2label label2id problem_type "
    "task_specific_params prefix finetuning_task max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    # Outputs and chunks of a forward pass.
    "output_attentions output_hidden_states return_dict torchscript chunk_size_feed_forward pretraining_tp "
    # Initialisation of weights that are loaded instead.
    "initializer_range "
    # Layers that are not trained: multi-token prediction, which the weights' check knows by its layer number.
    "num_nextn_predict_layers num_mtp_layers "
    # Read by transformers as part of another field.
    "qk_head_dim max_window_layers"
)
"""Fields of all families without effect on logprobs and gradients."""

ONLY: dict[str, Only] = {
    "hidden_act": Only(("silu", "swish"), "only SwiGLU is built"),
    "attention_dropout": Only((0, 0.0, None), "training runs without dropout"),
    "is_encoder_decoder": Only((False,), "only decoders are built"),
    "is_decoder": Only((False, True), ""),
    "add_cross_attention": Only((False,), "cross-attention is not built"),
    "cross_attention_hidden_size": Only((None,), "cross-attention is not built"),
    "tie_encoder_decoder": Only((False,), "only decoders are built"),
    "pruned_heads": Only((None, {}), "pruned heads are not built"),
    "quantization_config": Only((None,), "weights are trained as they are stored; use the unquantised checkpoint"),
    "use_bfloat16": Only((False, True), ""),
    "use_mrope": Only((False,), "rotary embeddings of images are not built"),
}
"""Fields that every family may have."""

NO_BIAS = Only((False, None), "its attention has biases, which are not built for this family")
FULL_ATTENTION = "its attention has a sliding window, which is not built"
NO_WINDOW = {"sliding_window": Only((None,), FULL_ATTENTION)}
SWITCHED_WINDOW = {"use_sliding_window": Only((False, None), FULL_ATTENTION)}
ROUTER_LOSS = _names("router_aux_loss_coef output_router_logits")
"""Weight of Hugging Face's optional loss; here trainer.policy.megatron_config.moe_aux_loss_coeff."""
SPARSE = {
    "decoder_sparse_step": Only((1,), "layers without experts are built only in front of those with experts"),
    "mlp_only_layers": Only(([], (), None), "layers without experts are built only in front of those with experts"),
}
SOFTMAX_EXPERTS = _names("num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob")
SIGMOID_EXPERTS = _names(
    "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
    "first_k_dense_replace routed_scaling_factor"
)
SIGMOID = {
    "norm_topk_prob": Only((True,), "Megatron always normalises sigmoid scores"),
    # Read by the publisher's own code, not by Hugging Face's class: another value is another model.
    "scoring_func": Only(("sigmoid",), "only sigmoid scores are built"),
    "topk_method": Only(("noaux_tc",), "only noaux_tc is built"),
    "moe_layer_freq": Only((1,), "every layer after the dense ones has experts"),
    "moe_router_activation_func": Only(("sigmoid",), "only sigmoid scores are built"),
    "ep_size": Only((1,), "the checkpoint is of one process"),
}
AUXILIARY_LOSS = _names("aux_loss_alpha seq_aux")
LATENT = _names("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
LATENT_ATTENTION = Ledger(
    used=LATENT | SIGMOID_EXPERTS | AUXILIARY_LOSS | ROUTER_LOSS,
    only={
        "attention_bias": NO_BIAS,
        "rope_interleave": Only((True,), "only interleaved rotary dimensions are built"),
        **SIGMOID,
    },
    rope_types=frozenset({"default", "yarn"}),
)

LEDGERS: dict[str, Ledger] = {
    "llama": Ledger(
        used=frozenset(),
        only={
            "attention_bias": NO_BIAS,
            "mlp_bias": Only((False, None), "its MLP has biases, which are not built"),
            "rope_interleaved": Only((False,), "interleaved rotary dimensions are not built for this family"),
        },
    ),
    "mistral": Ledger(used=frozenset(), only=NO_WINDOW),
    "mixtral": Ledger(
        used=SOFTMAX_EXPERTS - {"norm_topk_prob", "moe_intermediate_size"} | ROUTER_LOSS,
        only=NO_WINDOW | {"router_jitter_noise": Only((0, 0.0), "noise on the router's input is not built")},
    ),
    "qwen2": Ledger(used=_names("sliding_window layer_types"), only=SWITCHED_WINDOW),
    "qwen2_moe": Ledger(
        used=SOFTMAX_EXPERTS
        | ROUTER_LOSS
        | _names("sliding_window layer_types shared_expert_intermediate_size qkv_bias"),
        only=SWITCHED_WINDOW | SPARSE,
    ),
    "qwen3": Ledger(used=_names("sliding_window layer_types"), only=SWITCHED_WINDOW | {"attention_bias": NO_BIAS}),
    "qwen3_moe": Ledger(
        used=SOFTMAX_EXPERTS | ROUTER_LOSS | _names("sliding_window"),
        only=SWITCHED_WINDOW
        | SPARSE
        | {
            "attention_bias": NO_BIAS,
            # Fields of the publisher's other models, not read by Hugging Face's class.
            "qkv_bias": NO_BIAS,
            "use_qk_norm": Only((True,), "queries and keys are always normalised"),
            "shared_expert_intermediate_size": Only((0,), "shared experts are not built for this family"),
        },
    ),
    "deepseek_v3": LATENT_ATTENTION,
    "glm4_moe_lite": Ledger(
        used=LATENT_ATTENTION.used | {"mlp_layer_types"},
        only={
            **LATENT_ATTENTION.only,
            "partial_rotary_factor": Only((1, 1.0), "all rotary dimensions of latent attention are rotated"),
        },
        rope_types=LATENT_ATTENTION.rope_types,
    ),
    "glm4_moe": Ledger(
        used=SIGMOID_EXPERTS | ROUTER_LOSS | _names("attention_bias use_qk_norm partial_rotary_factor"),
        only=SIGMOID,
        rope_fields=frozenset({"partial_rotary_factor"}),
    ),
}
"""model_type -> its ledger: the families that can be trained."""

ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": _names("factor"),
    "llama3": _names("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _names(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
    ),
}
"""Kind of rotary embedding -> its fields of `rope_parameters`, in addition to those of all kinds."""
MAX_SHOWN = 60
"""Characters of a refused value in a message."""
ROPE_LENGTHS = "its frequencies change with the length of a sample, which is not built"
ROPE_REFUSED = {"dynamic": ROPE_LENGTHS, "longrope": ROPE_LENGTHS}


def config_problems(config: PretrainedConfig, given: Mapping[str, Any]) -> list[str]:
    """Everything in a configuration that would not be computed as Hugging Face computes it.

    Args: config: as read by transformers, of a family in LEDGERS; given: contents of config.json.
    """
    ledger = LEDGERS[config.model_type]
    unknown = [*_architecture(given), *_unknown(ledger, given)]
    return unknown or [*_values(ledger, config, given), *_rope(ledger, config), *_together(config)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _architecture(given: Mapping[str, Any]) -> Iterator[str]:
    for name in given.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            yield f"architectures is [{name}], and only models with a language-model head (...ForCausalLM) are built"


def _unknown(ledger: Ledger, given: Mapping[str, Any]) -> Iterator[str]:
    known = USED | NO_EFFECT | ONLY.keys() | ledger.used | ledger.only.keys() | {"architectures", "model_type"}
    for name in sorted(given.keys() - known):
        yield (
            f"{name} is {_short(given[name])}: unknown field for this family. If it does not change what the model "
            "computes, remove it from config.json"
        )


def _values(ledger: Ledger, config: PretrainedConfig, given: Mapping[str, Any]) -> Iterator[str]:
    for name, only in (ONLY | dict(ledger.only)).items():
        if name in given or hasattr(config, name):
            value = getattr(config, name, given.get(name))
            if value not in only.values and not _reads_quantised(name, config):
                yield f"{name} is {_short(value)}: {only.why}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        yield f"layer_types has {sorted(set(config.layer_types))}: {FULL_ATTENTION}"


def _reads_quantised(name: str, config: PretrainedConfig) -> bool:
    """Whether the field describes DeepSeek's FP8 weights, which are read and dequantised."""
    return (
        name == "quantization_config"
        and config.model_type == "deepseek_v3"
        and dict(config.quantization_config).get("quant_method") == "fp8"
    )


def _rope(ledger: Ledger, config: PretrainedConfig) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ledger.rope_types:
        why = ROPE_REFUSED.get(kind, f"only {', '.join(sorted(ledger.rope_types))} are built for this family")
        yield f"rope_parameters.rope_type is {kind!r}: {why}"
        return
    known = ROPE_FIELDS[kind] | ledger.rope_fields | {"rope_type", "type", "rope_theta"}
    for name in sorted(rope.keys() - known):
        if rope[name] != 1.0 or name != "partial_rotary_factor":
            yield f"rope_parameters.{name} is {rope[name]!r}, which is not built for {kind!r} in this family"


def _together(config: PretrainedConfig) -> Iterator[str]:
    """Fields that are supported only with certain values of others."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    latent = getattr(config, "kv_lora_rank", None) is not None
    if latent and heads != kv_heads:
        yield f"num_key_value_heads is {kv_heads}: latent attention has as many as num_attention_heads {heads}"
    if latent and getattr(config, "head_dim", None) not in (None, config.qk_rope_head_dim):
        yield f"head_dim is {config.head_dim}: latent attention rotates qk_rope_head_dim {config.qk_rope_head_dim}"
    if latent:
        yield from _latent_yarn(config.rope_parameters or {})
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts is None:
        return
    chosen = config.num_experts_per_tok
    if chosen > experts:
        yield f"num_experts_per_tok is {chosen}, more than the {experts} experts"
    if chosen == 1 and getattr(config, "norm_topk_prob", True):
        yield "num_experts_per_tok is 1 with normalised weights: the only expert would always have the weight 1"
    if getattr(config, "routed_scaling_factor", 1.0) == 0:
        yield "routed_scaling_factor is 0: Megatron reads it as no scaling"
    groups, group_topk = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if groups > 1 and chosen != 2 * group_topk:
        yield (
            f"num_experts_per_tok is {chosen} and topk_group {group_topk}: Megatron scores a group of experts by its "
            "best num_experts_per_tok / topk_group experts, Hugging Face always by its best 2"
        )


def _latent_yarn(rope: Mapping[str, Any]) -> Iterator[str]:
    if rope.get("rope_type") != "yarn":
        return
    if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
        yield "rope_parameters.attention_factor and truncate are not built for latent attention"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        yield (
            f"rope_parameters.mscale is {rope.get('mscale')} and mscale_all_dim {rope.get('mscale_all_dim')}: latent "
            "attention is built with both or neither"
        )
