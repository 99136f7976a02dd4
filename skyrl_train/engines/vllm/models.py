"""Models that vLLM cannot load or serve, found before an engine starts. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_train.hf.ledger import LEDGERS
from skyrl_train.hf.matrices import head_sizes, is_latent, num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ = {
    "deepseek_v3": ("topk_method", '"noaux_tc"', "without it, the routers' e_score_correction_bias is not loaded"),
    "glm4_moe_lite": ("first_k_dense_replace", "1", "transformers reads mlp_layer_types instead"),
}
"""model_type -> field of config.json that vLLM (0.32) reads and transformers does not, its usual value, details."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's CPU build (0.32) computes."""
CPU_LATENT_SIZE = 576
"""Size of the cached keys of latent attention that it computes."""


def model_problems(model: PretrainedConfig, given: str, device_type: str | None, sync: str | None) -> Iterator[str]:
    """Why engines cannot load or serve a model.

    Args: model: its configuration; given: the start of each problem, "<key> is <path>"; device_type: of the engines,
        None if unknown; sync: `trainer.policy.model.lora.sync` if adapters are trained.
    """
    if model.model_type in READ:
        field, usual, why = READ[model.model_type]
        if getattr(model, field, None) is None:
            yield f"{given}: its config.json has no {field}, which vLLM reads ({why}). Add it, often as {usual}"
    if device_type == "cpu" and model.model_type in LEDGERS:
        yield from _size_problems(model, given)
        if sync == "adapter" and num_experts(model):
            yield (
                f"{given} and has experts, and trainer.policy.model.lora.sync is adapter: without a GPU, vLLM serves "
                "no adapters of such models. Set trainer.policy.model.lora.sync=merged"
            )


def quantization_problems(
    model: PretrainedConfig, given: str, device_type: str | None, sync: str | None
) -> Iterator[str]:
    """Why engines cannot quantise a model while they load it. Args: like `model_problems`."""
    if getattr(model, "quantization_config", None) is not None:
        yield (
            f"{given}: its checkpoint is quantised already, and vLLM quantises weights in half precision alone. Use "
            "the unquantised checkpoint, or set generator.quantization=null"
        )
    if num_experts(model) and device_type == "cpu":
        yield (
            f"{given} and has experts: without a GPU, vLLM has no FP8 kernel for them. Set "
            "generator.quantization=null, or use engines on GPUs"
        )
    elif num_experts(model) and sync == "adapter":
        yield (
            f"{given} and has experts, and trainer.policy.model.lora.sync is adapter: not every FP8 kernel of vLLM "
            "for experts takes adapters. Set trainer.policy.model.lora.sync=merged, or generator.quantization=null"
        )


def _size_problems(model: PretrainedConfig, given: str) -> Iterator[str]:
    remedy = "Use another model, or engines on GPUs"
    if is_latent(model):
        latent, rotated = model.kv_lora_rank, model.qk_rope_head_dim
        if latent + rotated != CPU_LATENT_SIZE:
            yield (
                f"{given}: its kv_lora_rank {latent} + qk_rope_head_dim {rotated} is {latent + rotated}, and without a "
                f"GPU vLLM computes latent attention of {CPU_LATENT_SIZE} alone. {remedy}"
            )
    elif (size := head_sizes(model)[0]) not in CPU_HEAD_SIZES:
        yield (
            f"{given}: its attention heads have size {size}, and without a GPU vLLM computes the sizes "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. {remedy}"
        )
