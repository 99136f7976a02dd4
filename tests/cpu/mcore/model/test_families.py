"""Models that would not be computed as Hugging Face does are refused, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_train.megatron.verify.layout_check import run_layout
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout


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
    "name",
    [
        "calculate_per_token_loss",
        "moe_z_loss_coeff",
        "moe_expert_capacity_factor",
        "attention_dropout",
        "window_size",
        "tensor_model_parallel_size",
        "batch_p2p_comm",
    ],
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
