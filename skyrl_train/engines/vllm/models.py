"""Models that vLLM cannot load or serve, found before an engine starts. Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_train.hf.ledger import LEDGERS
from skyrl_train.hf.matrices import head_sizes, is_latent, layers, num_experts

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

FP8_MULTIPLE = 16
"""The number of outputs of an FP8 layer on a rank is a multiple of this. On a GPU vLLM (0.32) pads others, and fails
with "Overwriting existing tensor attribute: weight_loader" (vllm#47023)."""
JOINED = {
    **{name: "qkv_proj" for name in ("q_proj", "k_proj", "v_proj")},
    **{name: "gate_up_proj" for name in ("gate_proj", "up_proj")},
    **{name: "fused_qkv_a_proj" for name in ("q_a_proj", "kv_a_proj_with_mqa")},
}
"""Hugging Face's layer -> vLLM's, whose outputs are those of several."""


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
    model: PretrainedConfig, given: str, device_type: str | None, sync: str | None, tp_size: int
) -> Iterator[str]:
    """Why engines of `tp_size` ranks cannot quantise a model while they load it. Args: others like `model_problems`."""
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
    if device_type == "cuda" and model.model_type in LEDGERS:
        for name, outputs in _outputs(model, tp_size).items():
            if outputs % FP8_MULTIPLE:
                yield (
                    f"{given}: {name} has {outputs} outputs on each rank of an engine, and vLLM's FP8 kernel needs a "
                    f"multiple of {FP8_MULTIPLE}. Set generator.quantization=null, or another "
                    "generator.inference_engine_tensor_parallel_size"
                )


def _outputs(model: PretrainedConfig, tp_size: int) -> Counter[str]:
    """Outputs on one rank of each layer that is quantised, without experts, whose kernel is another."""
    found: Counter[str] = Counter()
    for layer in {kind.is_sparse: kind for kind in layers(model)}.values():
        own: Counter[str] = Counter()
        for matrix in layer.linear:
            if matrix.sharding == "experts":
                continue
            module, _, name = matrix.module.rpartition(".")
            outputs = matrix.outputs
            if matrix.sharding == "tensor" and name not in ("o_proj", "down_proj"):
                outputs //= tp_size
            if name in ("k_proj", "v_proj"):
                outputs = max(outputs, head_sizes(model)[0])  # ranks beyond the number of heads have a copy
            own[f"{module}.{JOINED.get(name, name)}"] += outputs
        found |= own
    return found


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
