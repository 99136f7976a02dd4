"""Models that would not be computed as Hugging Face does are refused, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, SHAPE, make_trial, write_family
from layouts import layout
from safetensors.torch import load_file, save_file

from skyrl_train.megatron import families
from skyrl_train.megatron.bridge import load_hf_config
from skyrl_train.megatron.layout_check import run_layout


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        families.family(load_hf_config(str(folder)), "MODEL")
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("mistral", {"sliding_window": 64}, "its attention has a sliding window"),
        ("llama3_rope", {"attention_bias": True}, "its attention has biases (attention_bias)"),
        ("llama3_rope", {"mlp_bias": True}, "its MLP has biases (mlp_bias)"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 2}, "num_experts_per_tok / topk_group is not 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is not empty"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
    ],
)
def test_a_variant_that_would_be_computed_differently_is_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
):
    kind, own = FAMILIES[name]
    getattr(transformers, f"{kind}Config")(**{**SHAPE, **own, **changes}).save_pretrained(tmp_path)
    assert f"MODEL ({load_hf_config(str(tmp_path)).model_type}) cannot be trained exactly: {says}" in refusal(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_the_table_is_accepted(name: str, tmp_path: Path):
    kind, own = FAMILIES[name]
    getattr(transformers, f"{kind}Config")(**{**SHAPE, **own}).save_pretrained(tmp_path)
    assert families.family(load_hf_config(str(tmp_path)), "MODEL") is not None


def test_other_families_are_refused_with_the_ones_there_are(tmp_path: Path):
    transformers.Gemma3TextConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert "MODEL is a 'gemma3_text' model, which mbridge cannot build; use one of deepseek_v3" in refusal(tmp_path)
    transformers.PhiConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert "'phi' model, which mbridge cannot build" in refusal(tmp_path)


def test_a_checkpoint_with_weights_that_nobody_reads_is_refused(tmp_path: Path):
    write_family("qwen3_tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        RuntimeError, match="weights that the qwen3 bridge does not read: model.layers.1.self_attn.sinks"
    ):
        run_layout(make_trial(tmp_path), layout(2, {"pp": 2}))


@pytest.mark.parametrize(
    "name", ["calculate_per_token_loss", "moe_z_loss_coeff", "tensor_model_parallel_size", "batch_p2p_comm"]
)
def test_a_field_that_would_break_exactness_cannot_be_passed_to_megatron(name: str, tmp_path: Path):
    write_family("qwen3_moe", tmp_path)
    with pytest.raises(RuntimeError, match=f"transformer_config_kwargs.{name} cannot be set"):
        run_layout(make_trial(tmp_path), layout(1, {}, transformer_config_kwargs={name: 1}))


def test_other_fields_reach_megatron_and_replace_ours(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path))
    plain = run_layout(trial, layout(1, {}))
    changed = run_layout(trial, layout(1, {}, transformer_config_kwargs={"layernorm_epsilon": 1.0}))
    assert (plain.logprobs - changed.logprobs).abs().max() > 1e-2
