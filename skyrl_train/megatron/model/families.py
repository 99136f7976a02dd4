"""Corrections of mbridge's bridges, per model family, so that Megatron computes what Hugging Face computes.

mbridge 0.15 was written for transformers 4; its names and shapes are used unchanged. Each correction was found by
comparing logprobs and gradients with Hugging Face (tests/cpu/mcore/verify/test_exactness.py, docs/exactness.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models import DeepseekV3Bridge, GLM4MoEBridge, Qwen2MoEBridge, Qwen3MoEBridge
from torch import Tensor
from transformers import PretrainedConfig

from skyrl_train.device import device
from skyrl_train.hf.ledger import config_problems


class Dequantised(SafeTensorIO):
    """Reads FP8 weights with a scale per block. mbridge's class reads blocks of 128 x 128, into bfloat16, on GPUs."""

    def __init__(self, folder: str, block: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(folder)
        self._block, self._dtype, self._names = block, dtype, frozenset(self.load_hf_weight_names())

    @classmethod
    def of(cls, hf_config: PretrainedConfig, folder: str, dtype: torch.dtype) -> Dequantised:
        """Reader of a folder whose configuration has `quantization_config`."""
        return cls(folder, dict(hf_config.quantization_config)["weight_block_size"], dtype)

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, Tensor]:
        scales = {name: scale for name in hf_weight_names if (scale := f"{name}_scale_inv") in self._names}
        read: dict[str, Tensor] = super().load_some_hf_weight([*hf_weight_names, *scales.values()])
        for name, scale in scales.items():
            read[name] = self._product(read[name], read.pop(scale), scale)
        return read

    def _product(self, weight: Tensor, scale: Tensor, name: str) -> Tensor:
        blocks = [-(-size // side) for size, side in zip(weight.shape, self._block, strict=True)]
        if list(scale.shape) != blocks:
            raise ValueError(f"{name} is {list(scale.shape)}, not {blocks} as by weight_block_size {self._block}")
        weight, scale = weight.to(device()).float(), scale.to(device()).float()
        for dim, side in enumerate(self._block):
            scale = scale.repeat_interleave(side, dim).narrow(dim, 0, weight.shape[dim])
        return (weight * scale).to(self._dtype).cpu()


class DeepseekV3(DeepseekV3Bridge):
    """Multi-latent attention and shared experts: DeepSeek-V3, Moonlight, GLM-4.7-Flash. Without MTP layers."""

    def _build_config(self) -> Any:
        if not hasattr(self.hf_config, "first_k_dense_replace"):  # GLM-4.7-Flash names each layer instead
            self.hf_config.first_k_dense_replace = self.hf_config.mlp_layer_types.index("sparse")
        _leave_queries_without_latent_unnormed()
        return super()._build_config()

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        for name in ("mtp_num_layers", "mtp_loss_scaling_factor"):
            kwargs.pop(name, None)
        # megatron-core renamed the field.
        kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
        kwargs["attention_backend"] = "auto"
        return super()._build_base_config(text_config_key, **kwargs)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        """Pad the vocabulary, which mbridge omits for this family."""
        args = super()._get_gptmodel_args()
        multiple = self.make_vocab_size_divisible_by or 1
        self.vocab_size = args["vocab_size"]
        args["vocab_size"] = self.padded_vocab_size = -(-self.vocab_size // multiple) * multiple
        return args

    def _get_safetensor_io(self, weights_path: str) -> Any:
        """Read unquantised checkpoints, too: mbridge reads every checkpoint of this family as FP8."""
        folder = self._get_actual_hf_path(weights_path)
        if getattr(self.hf_config, "quantization_config", None) is not None:
            return Dequantised.of(self.hf_config, folder, self.dtype)
        return SafeTensorIO(folder)


class _SoftmaxRouter(Bridge):
    """Sets the order of softmax and top-k at once: Megatron rejects top-1 in the order that mbridge sets first."""

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        return super()._build_base_config(text_config_key, **kwargs)


class Qwen2Moe(_SoftmaxRouter, Qwen2MoEBridge):
    """Qwen1.5 and Qwen2 with experts and a gated shared expert."""


class Qwen3Moe(_SoftmaxRouter, Qwen3MoEBridge):
    """Qwen3 with experts."""


class Glm4Moe(GLM4MoEBridge):
    """GLM-4.5 and later with grouped-query attention. Without MTP layers."""

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        """Map a tied head, too."""
        if mcore_weights_name in self._DIRECT_MAPPING:
            return [self._DIRECT_MAPPING[mcore_weights_name]]
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)


@functools.cache
def _leave_queries_without_latent_unnormed() -> None:
    """megatron-core 0.19 fuses a norm into linear_q_proj where there is no query latent; no such model has one."""
    try:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    except ImportError:  # before 0.19
        return
    resolve = QKNormConfigResolver._resolve_mla_qk_layernorm

    def without(self: Any) -> Any:
        resolved = resolve(self)
        if not self.has_q_lora:
            resolved["linear_q_proj"] = self.submodules.linear_q_proj or self.linear_impl
        return resolved

    QKNormConfigResolver._resolve_mla_qk_layernorm = without


FAMILIES: dict[str, type[Bridge]] = {
    **{name: _MODEL_REGISTRY[name] for name in ("llama", "mixtral", "qwen2", "qwen3")},
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    # Llama's weights and names, without a sliding window.
    "mistral": _MODEL_REGISTRY["llama"],
    "deepseek_v3": DeepseekV3,
    "glm4_moe_lite": DeepseekV3,
    "glm4_moe": Glm4Moe,
}
"""model_type of a config.json -> bridge, for the families whose gradients are compared with Hugging Face's."""


def family(hf_config: PretrainedConfig, path: str) -> type[Bridge]:
    """Return the bridge class of the model.

    Raises: ValueError for a family or a variant that would not be computed as in Hugging Face. The driver has already
        checked it, including unknown fields of the file (checks/equivalence.py).
    """
    kind = hf_config.model_type
    problems = config_problems(hf_config, {}) if kind in FAMILIES else ["its family is not built"]
    if problems:
        raise ValueError(f"{path} ({kind}) cannot be trained exactly: {'; '.join(problems)}")
    return FAMILIES[kind]


def corrections(hf_config: PretrainedConfig) -> dict[str, Any]:
    """TransformerConfig fields that mbridge omits or sets differently from Hugging Face."""
    kind = hf_config.model_type
    if kind == "mixtral":
        return {"moe_router_pre_softmax": False}
    if kind == "qwen2_moe":
        return {"moe_shared_expert_gate": True, "add_qkv_bias": getattr(hf_config, "qkv_bias", True)}
    if kind in ("deepseek_v3", "glm4_moe_lite"):
        own = getattr(hf_config, "mlp_layer_types", None)
        layers = {"moe_layer_freq": [int(layer == "sparse") for layer in own]} if own else {}
        return layers | _groups(hf_config) | _latent_attention_rope(hf_config)
    if kind == "glm4_moe":
        return _groups(hf_config) | {
            "add_qkv_bias": hf_config.attention_bias,
            "moe_shared_expert_intermediate_size": hf_config.n_shared_experts * hf_config.moe_intermediate_size,
        }
    return {}


def _groups(hf_config: PretrainedConfig) -> dict[str, Any]:
    if (hf_config.n_group or 1) == 1:
        return {}
    return {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}


def _latent_attention_rope(hf_config: PretrainedConfig) -> dict[str, Any]:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        # Megatron scales the softmax by rotary_scaling_factor under plain rope, too.
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", hf_config.max_position_embeddings
        ),
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
