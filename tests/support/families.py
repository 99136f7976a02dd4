"""Tiny random float32 models of every family, and a mini-batch for them with Hugging Face's gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.reductions import MaxLengths
from skyrl_train.megatron.verify.trial import Trial, trial_objective
from skyrl_train.types import ExperienceBatch

VOCABULARY = 131
"""Not divisible by any tensor-parallel size."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    **EXPERTS,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama3_rope_tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3_without_q_lora": ("DeepseekV3", {**MLA, "q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", {k: v for k, v in MLA.items() if k != "first_k_dense_replace"}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
}
MOE = [name for name, (_, changes) in FAMILIES.items() if "num_experts_per_tok" in changes]
COMBINED = ("qwen2_tied", "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3")
"""Families with which layouts of several dimensions are tested: they have biases, norms of heads, tied embeddings,
experts and latent attention. How the parts of a family are sharded is tested with each dimension by itself."""


def write_family(name: str, folder: Path, **changes: Any) -> Path:
    """A random float32 checkpoint of the family; returns the folder."""
    kind, own = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **own, **changes})
    transformers.set_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # Norms away from 1, biases away from 0, routers away from ties.
            if "inv_freq" not in key:
                parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def lengths(num_samples: int = 10) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [int(x) for x in torch.randint(3, 40, (num_samples,), generator=generator)]


def make_trial(path: Path, sample_lengths: list[int] | None = None, **changes: Any) -> Trial:
    """Random tokens, prompts and tool replies masked, groups of two, with KL and entropy terms and temperature 0.7."""
    sizes = sample_lengths or lengths()
    generator = torch.Generator().manual_seed(2)
    total = sum(sizes)
    masks = []
    for size in sizes:
        mask = torch.ones(size, dtype=torch.bool)
        mask[: max(1, size // 4)] = False
        mask[size // 2 : size // 2 + size // 8] = False
        masks.append(mask)
    experience = ExperienceBatch(
        token_ids=torch.randint(0, VOCABULARY, (total,), generator=generator),
        cu_seqlens=torch.tensor([0, *sizes]).cumsum(0).int(),
        loss_mask=torch.cat(masks),
        group_ids=torch.arange(len(sizes)) // 2,
        rollout_logprobs=-4.9 + 0.3 * torch.randn(total, generator=generator),
        staleness=torch.zeros(total, dtype=torch.int32),
        rewards=torch.zeros(total, dtype=torch.float64),
    )
    advantages = torch.randn(len(sizes), generator=generator)
    trial = Trial(
        model_path=str(path),
        experience=experience,
        advantages=torch.repeat_interleave(advantages, torch.tensor(sizes)),
        old_offsets=0.2 * torch.randn(total, generator=generator),
        ref_offsets=0.3 * torch.randn(total, generator=generator),
        objective=trial_objective(0.7, eps_clip_high=0.28),
        max_lengths=MaxLengths(64, 96),
    )
    return replace(trial, **changes)


def without_kl(objective: Objective) -> Objective:
    """The objective without its KL term, for a policy without a reference."""
    return replace(objective, terms=tuple(term for term in objective.terms if term.name != "kl"))
