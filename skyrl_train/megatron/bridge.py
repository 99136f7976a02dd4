"""Hugging Face <-> Megatron: mbridge with what it needs beside transformers 5 and the torch layers.

mbridge 0.15 was written for transformers 4. Its bridges are used as they are for names and shapes; this file gives them the
configuration fields they look for and corrects what they set differently from Hugging Face's own model code. Each correction
was found by comparing logprobs (docs/exactness.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core.bridge import Bridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skyrl_train.config import MegatronConfig


def load_hf_config(path: str) -> PretrainedConfig:
    """The model's configuration with the fields mbridge reads under their old names."""
    config = AutoConfig.from_pretrained(path)
    rope = getattr(config, "rope_parameters", None) or {}
    if not hasattr(config, "rope_theta"):
        config.rope_theta = rope.get("rope_theta", 10000.0)
    if "partial_rotary_factor" in rope and not hasattr(config, "partial_rotary_factor"):
        config.partial_rotary_factor = rope["partial_rotary_factor"]
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _family_corrections(hf_config: PretrainedConfig, megatron: MegatronConfig) -> dict[str, Any]:
    """TransformerConfig fields that mbridge leaves out or sets differently from Hugging Face, by model type."""
    kind = hf_config.model_type
    if kind == "mixtral":
        return {"moe_router_pre_softmax": False}
    if kind == "qwen2_moe":
        return {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": False}
    if kind == "deepseek_v3":
        rope = getattr(hf_config, "rope_parameters", None) or {}
        yarn = rope.get("rope_type", "default") == "yarn"
        original = rope.get("original_max_position_embeddings", hf_config.max_position_embeddings)
        fields: dict[str, Any] = {
            "mtp_num_layers": None,
            "rope_type": "yarn" if yarn else "rope",
            "rotary_scaling_factor": rope.get("factor", 1.0),
            "original_max_position_embeddings": original,
            "beta_fast": rope.get("beta_fast", 32),
            "beta_slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
            # The bias of the router is part of the checkpoint; training must not drift it without being asked.
            "moe_router_bias_update_rate": 0.0,
        }
        if hf_config.n_group and hf_config.n_group > 1:
            fields |= {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}
        return fields
    return {}


def _common_fields(megatron: MegatronConfig, *, torch_layers: bool) -> dict[str, Any]:
    tp = megatron.tensor_model_parallel_size
    fields: dict[str, Any] = {
        "sequence_parallel": megatron.sequence_parallel and tp > 1,
        # Every loss term is a plain sum over the mini-batch; see megatron/step.py.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "recompute_granularity": megatron.recompute_granularity,
    }
    if megatron.recompute_granularity == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if megatron.recompute_granularity == "selective":
        fields["recompute_modules"] = list(megatron.recompute_modules)
    if torch_layers:
        fields |= {
            "use_cpu_initialization": not torch.cuda.is_available(),
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
        }
    return fields


def build_bridge(path: str, megatron: MegatronConfig, dtype: torch.dtype, *, torch_layers: bool) -> Bridge:
    """The bridge of the model at `path` for the layout of this process (Megatron's groups must exist).

    Raises: ValueError for a model type that mbridge does not know.
    """
    hf_config = load_hf_config(path)
    known = AutoBridge.list_supported_models()
    if hf_config.model_type not in known:
        raise ValueError(
            f"{path} is a {hf_config.model_type!r} model, which the Megatron bridge cannot build; it knows {', '.join(sorted(known))}"
        )
    if hf_config.model_type == "deepseek_v3":
        _patch_deepseek_config()
    bridge = AutoBridge.from_config(
        hf_config, dtype=dtype, make_vocab_size_divisible_by=megatron.tensor_model_parallel_size
    )
    # mbridge writes the name of a tied head into a dictionary of the class, where it would poison the next model.
    tied = getattr(hf_config, "tie_word_embeddings", False)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**type(bridge)._DIRECT_MAPPING, "output_layer.weight": head}
    fields = _common_fields(megatron, torch_layers=torch_layers) | _family_corrections(hf_config, megatron)
    if getattr(bridge.config, "num_moe_experts", None):
        fields["moe_grouped_gemm"] = True
        fields["moe_shared_expert_overlap"] = False
        if megatron.moe_aux_loss_coeff > 0:
            fields |= {
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": megatron.moe_aux_loss_coeff,
            }
        else:
            fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    bridge.set_extra_args(**fields, **megatron.transformer_config_kwargs)
    return bridge


def _patch_deepseek_config() -> None:
    """mbridge's DeepSeek-V3 passes a keyword that megatron-core renamed, and refuses float32 checkpoints."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    if getattr(DeepseekV3Bridge, "_skyrl_patched", False):
        return
    build_base = DeepseekV3Bridge._build_base_config

    def renamed(self: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("original_max_position_embeddings", kwargs.pop("max_position_embeddings", 4096))
        kwargs["attention_backend"] = "auto"
        kwargs.pop("mtp_num_layers", None)
        kwargs.pop("mtp_loss_scaling_factor", None)
        kwargs["rope_type"] = "rope" if kwargs.get("rope_type") == "default" else kwargs.get("rope_type", "rope")
        return build_base(self, **kwargs)

    read_quantised = DeepseekV3Bridge._get_safetensor_io

    def reader(self: Any, path: str) -> Any:
        quantised = getattr(self.hf_config, "quantization_config", None) is not None
        return read_quantised(self, path) if quantised else SafeTensorIO(self._get_actual_hf_path(path))

    DeepseekV3Bridge._build_base_config = renamed
    DeepseekV3Bridge._get_safetensor_io = reader
    DeepseekV3Bridge._skyrl_patched = True


def correct_rope(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Give the model Hugging Face's own rotary frequencies.

    mbridge asks `"rope_scaling" in hf_config`, which transformers 5 answers with False, so llama3, linear and yarn scaling
    would be dropped without a word. Multi-latent attention sets its scaling through the configuration instead.
    """
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    rotary = getattr(model, "rotary_pos_emb", None)
    if kind == "default" or rotary is None or model.config.multi_latent_attention:
        return
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf_config, "cpu")
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    rotary.forward.cache_clear()
    if attention_factor == 1:
        return
    model.config.yarn_rotary_scaling_factor = math.exp((attention_factor - 1) / 0.1)  # 0.16 reads it in each forward
    for layer in model.decoder.layers:  # 0.19 keeps it in the layer
        if hasattr(layer.self_attention, "_yarn_concentration_factor"):
            layer.self_attention._yarn_concentration_factor = attention_factor
