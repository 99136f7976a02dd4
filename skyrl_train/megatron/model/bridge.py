"""Hugging Face <-> Megatron: mbridge, adapted to transformers 5 and the torch layers.

mbridge 0.15 was written for transformers 4; this file gives its bridges configuration fields under their old names, the
layout, and the rotary frequencies. Corrections for single families are in families.py.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skyrl_train.config.policy import OWN_STAGES, MegatronConfig
from skyrl_train.hf.checkpoint import some, tensor_files
from skyrl_train.hf.flops import matrix_weights
from skyrl_train.megatron.layers.recompute import CHEAP, SWIGLU, recompute_cheap
from skyrl_train.megatron.model.families import corrections, family
from skyrl_train.megatron.model.stages import layers_of_stages, megatron_layout
from skyrl_train.megatron.weights.gather import gather_json

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside multi-latent attention: transformers uses the default, whatever rms_norm_eps is."""


def load_hf_config(path: str) -> PretrainedConfig:
    """The model's configuration, with the fields that mbridge reads under their old names."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    rope = getattr(config, "rope_parameters", None) or {}
    if not hasattr(config, "rope_theta"):
        config.rope_theta = rope.get("rope_theta", 10000.0)
    if "partial_rotary_factor" in rope:  # Glm4MoeConfig has an unused 0.5 besides
        config.partial_rotary_factor = rope["partial_rotary_factor"]
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _cheap_recomputation(megatron: MegatronConfig, *, torch_layers: bool) -> set[str]:
    """Modules that the torch layers recompute themselves.
    Raises: ValueError for one that Transformer Engine's layers do not have.
    """
    if not torch_layers and SWIGLU in megatron.recomputed:
        raise ValueError(
            f"megatron_config.recompute_modules contains {SWIGLU}, which Transformer Engine's layers do not have. Set "
            "transformer_impl=torch or remove it"
        )
    return set(megatron.recomputed).intersection(CHEAP if torch_layers else ())


def _common_fields(megatron: MegatronConfig, cheap: set[str], *, torch_layers: bool) -> dict[str, Any]:
    tp = megatron.tensor_model_parallel_size
    fields: dict[str, Any] = {
        "sequence_parallel": megatron.sequence_parallel and tp > 1,
        # Every loss term is a plain sum over the mini-batch; see megatron/passes/step.py.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": True,
        # Megatron then calls the functions of swiglu.py and rope.py, with both kinds of layers.
        "bias_activation_fusion": True,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "recompute_granularity": megatron.recompute,
    }
    if megatron.virtual_pipeline_model_parallel_size is None:
        # mbridge disables it. A single message gets communicators for its two ranks besides that of the group, one for
        # each direction. torch waits for the end of the message, so it needs no synchronisation.
        fields |= {"batch_p2p_comm": True, "batch_p2p_sync": False}
    if megatron.recompute == "full":
        num = megatron.recompute_num_layers
        fields["recompute_method"] = "uniform" if num is None else "block"
        fields["recompute_num_layers"] = num or 1
    if megatron.recompute == "selective":
        fields["recompute_modules"] = [name for name in megatron.recomputed if name not in cheap]
    if torch_layers:
        fields |= {
            "use_cpu_initialization": not torch.cuda.is_available(),
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
        }
    return fields


def build_bridge(path: str, megatron: MegatronConfig, dtype: torch.dtype, *, torch_layers: bool) -> Bridge:
    """Build the bridge of the model at `path` for the layout of this process (Megatron's groups must exist).
    Raises: ValueError for a family or variant that would not be computed as Hugging Face does.
    """
    hf_config = load_hf_config(path)
    bridge = family(hf_config, path)(
        hf_config, dtype=dtype, make_vocab_size_divisible_by=megatron.tensor_model_parallel_size
    )
    # mbridge writes the name of a tied head into a dictionary of the class, which would affect the next model.
    tied = getattr(hf_config, "tie_word_embeddings", False)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**type(bridge)._DIRECT_MAPPING, "output_layer.weight": head}
    cheap = _cheap_recomputation(megatron, torch_layers=torch_layers)
    fields = _common_fields(megatron, cheap, torch_layers=torch_layers) | corrections(hf_config)
    if getattr(bridge.config, "num_moe_experts", None):
        fields["moe_grouped_gemm"] = True
        fields["moe_shared_expert_overlap"] = False
        # The router's bias is part of the checkpoint; finalize_model_grads must not update it.
        fields["moe_router_bias_update_rate"] = 0.0
        # Megatron's load-balancing loss is per micro-batch; balance.py has that of the mini-batch.
        fields |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    fields |= _stages(hf_config, megatron)
    bridge.set_extra_args(**(fields | megatron.transformer_config_kwargs))
    recompute_cheap(bridge.config, cheap)
    virtual = bridge.config.virtual_pipeline_model_parallel_size
    if virtual != megatron.virtual_pipeline_model_parallel_size:
        raise ValueError(
            "megatron_config.transformer_config_kwargs.pipeline_model_parallel_layout has stages for "
            f"virtual_pipeline_model_parallel_size={virtual}. Set that key too"
        )
    # Formatting the names took a tenth of an export's time on the host.
    bridge._weight_name_mapping_mcore_to_hf = functools.cache(bridge._weight_name_mapping_mcore_to_hf)
    _read_checked_files(bridge)
    return bridge


def _read_checked_files(bridge: Bridge) -> None:
    """Have the bridge load each tensor from the file that the checks read. Without an index mbridge searches all files,
    in any order; its reader of FP8 weights fails.
    """
    build_reader = bridge._get_safetensor_io

    def reader_of_checked_files(folder: str) -> Any:
        reader = build_reader(folder)
        reader.index = {name: str(file.absolute()) for name, file in tensor_files(folder).items()}
        return reader

    bridge._get_safetensor_io = reader_of_checked_files


def _stages(hf_config: PretrainedConfig, megatron: MegatronConfig) -> dict[str, Any]:
    """Uneven pipeline stages, unless Megatron's even ones are as good or the user chose others."""
    size = megatron.pipeline_model_parallel_size
    if size == 1 or any(name in megatron.transformer_config_kwargs for name in OWN_STAGES):
        return {}
    costs, head = matrix_weights(hf_config)
    counts = layers_of_stages(costs, head, size, megatron.virtual_pipeline_model_parallel_size or 1)
    if len(set(counts)) == 1:
        return {}
    return {"pipeline_model_parallel_layout": megatron_layout(counts, size)}


def check_all_weights_are_read(bridge: Bridge, modules: list[GPTModel], folder: str) -> None:
    """Raises: ValueError if the checkpoint in `folder` has weights that no rank holds; mbridge would ignore them.
    A collective over the pipeline and expert groups.
    """
    read = {
        hf_name
        for module in modules
        for name in bridge._weight_name_mapping_mcore_local_to_global(module).values()
        for hf_name in bridge._weight_name_mapping_mcore_to_hf(name)
    }
    for group in (parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        read = set().union(*gather_json(sorted(read), group))
    layers = bridge.hf_config.num_hidden_layers
    ignored = sorted(name for name in tensor_files(folder).keys() - read if not _needless(name, layers))
    if ignored:
        kind = bridge.hf_config.model_type
        raise ValueError(f"{folder} has weights that the {kind} bridge does not read: {some(ignored)}")


def _needless(name: str, num_layers: int) -> bool:
    """Scales of a quantised checkpoint, rotary tables, a tied head that was written out, and MTP layers."""
    layer = re.search(r"layers\.(\d+)\.", name)
    beyond = layer is not None and int(layer.group(1)) >= num_layers
    return beyond or name == "lm_head.weight" or name.endswith(("_scale_inv", "inv_freq"))


def match_hugging_face(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Apply to a built model what Megatron's configuration cannot express."""
    _correct_rope(model, hf_config)
    _leave_padding_untrained(model, hf_config)
    if model.config.multi_latent_attention:
        for layer in model.decoder.layers:
            for name in ("linear_q_up_proj", "linear_kv_up_proj"):
                projection = getattr(layer.self_attention, name, None)
                if projection is not None:
                    projection.eps = LATENT_NORM_EPS


def _correct_rope(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Give the model Hugging Face's own rotary frequencies.

    mbridge checks `"rope_scaling" in hf_config`, which is False with transformers 5, so llama3, linear and yarn scaling
    would be dropped silently. Multi-latent attention sets its scaling through the configuration instead.
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
    # 0.16 computes it in each forward: 1 + 0.1 * mscale * log(scaling factor), over the same of mscale_all_dim.
    model.config.yarn_rotary_scaling_factor = math.exp(10)
    model.config.yarn_mscale, model.config.yarn_mscale_all_dim = attention_factor - 1, 0.0
    for layer in model.decoder.layers:  # 0.19 keeps it in the layer
        if hasattr(layer.self_attention, "_yarn_concentration_factor"):
            layer.self_attention._yarn_concentration_factor = attention_factor


def _leave_padding_untrained(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Mask the gradient of embedding lookups of the padding token, as `nn.Embedding(..., padding_idx=...)` does.

    Samples may contain the token: models pad with their end of sequence, for example. A tied head still trains the row.
    Checkpoints keep the row at 0, where a norm makes the gradient of a lookup about a thousand times too large.
    """
    padding = getattr(hf_config, "pad_token_id", None)
    if padding is None or not model.pre_process:
        return
    token = padding if padding >= 0 else hf_config.vocab_size + padding  # as nn.Embedding counts

    def mask_gradient(embedding: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        if out.requires_grad:
            is_padding = args[0] == token  # [batch, tokens], as is the output
            if embedding.reduce_scatter_embeddings:  # the output is this rank's part of [tokens, batch]
                group = embedding.tp_group
                is_padding = is_padding.t().chunk(group.size())[group.rank()]
            out.register_hook(lambda gradient: gradient.masked_fill(is_padding.unsqueeze(-1), 0))

    model.embedding.word_embeddings.register_forward_hook(mask_gradient)
