"""Adapters on their way out are checked against the live ones: right ones pass, stale and exchanged ones are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.megatron.lora.adapters import Lora
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.verify.layout_check import OPTIMIZER
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights import proof
from skyrl_train.megatron.weights.export import export_adapter
from skyrl_train.ranks import Rendezvous
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.adapters import write_adapter
from tests.support.families import write_family
from tests.support.layouts import layout

Named = Iterator[tuple[str, Tensor]]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense TP2 DP2": ("qwen3_tied", 4, {"tp": 2}),
    "experts EP2 ETP2": ("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}),
    "latent attention EP2 PP2": ("deepseek_v3", 4, {"ep": 2, "pp": 2}),
}


def one_stale(lora: Lora) -> Named:
    """B of one module of several in its layer as it was before the last step."""
    for name, tensor in export_adapter(lora):
        yield name, tensor + 1e-3 if name.endswith("1.mlp.up_proj.lora_B.weight") else tensor


def exchanged(lora: Lora) -> Named:
    """The A of gate and up, which one layer computes, under each other's names."""
    named = dict(export_adapter(lora))
    for name in named:
        other = name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")
        yield name, named[other if "0.mlp" in name and "lora_A" in name else name]


def one_expert_stale(lora: Lora) -> Named:
    for name, tensor in export_adapter(lora):
        yield name, tensor + 1e-3 if name.endswith("layers.2.mlp.experts.3.down_proj.lora_A.weight") else tensor


def _check(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, LoraConfig, Any]) -> str:
    """What was found, or nothing."""
    path, megatron, config, faulty = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True, lora=config)
    build_optimizer(model, OPTIMIZER)
    assert model.lora is not None
    for dtype in (torch.float32, torch.bfloat16):
        assert {tensor.dtype for _, tensor in proof.checked_adapters(model.lora, dtype)} == {dtype}
    if faulty is None:
        return ""
    proof.export_adapter = faulty
    try:
        list(proof.checked_adapters(model.lora, torch.float32))
    except WeightSyncError as error:
        return str(error)
    return ""


def check(name: str, tmp_path: Path, faulty: Callable[[Lora], Named] | None = None) -> str:
    family, processes, sizes = LAYOUTS[name]
    path = write_family(family, tmp_path / "model")
    config = write_adapter(tmp_path / "adapter", path)
    arguments = (str(path), layout(processes, sizes).megatron, config, faulty)
    return " ".join(run_on_ranks(_check, arguments, processes, timeout_s=120))


@pytest.mark.parametrize(
    ("name", "faulty", "found"),
    [
        ("dense TP2 DP2", one_stale, r" 1 of 56 tensors .*model\.layers\.1\.mlp\.up_proj\.lora_B"),
        ("dense TP2 DP2", exchanged, r" 2 of 56 tensors .*model\.layers\.0\.mlp\.gate_proj\.lora_A.*up_proj\.lora_A"),
        ("experts EP2 ETP2", one_expert_stale, r" 1 of \d+ tensors .*layers\.2\.mlp\.experts\.3\.down_proj\.lora_A"),
    ],
    ids=["one stale", "exchanged", "one expert stale"],
)
def test_adapters_that_are_not_the_live_ones_are_named(name: str, faulty: Any, found: str, tmp_path: Path):
    """Before the fault the same model passes, in both dtypes."""
    message = check(name, tmp_path, faulty)
    assert "does not yield the current adapters" in message and re.search(found, message), message


def test_adapters_of_latent_attention_and_of_every_stage_pass(tmp_path: Path):
    assert check("latent attention EP2 PP2", tmp_path).strip() == ""
