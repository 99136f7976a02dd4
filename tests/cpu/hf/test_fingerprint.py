"""A fingerprint differs if any kind of tensor does, at every depth of a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_train.hf.fingerprint import fingerprint, matches

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
EXPERTS = tuple(f"mlp.experts.{i}.{name}_proj.weight" for i in range(16) for name in ("gate", "up", "down"))
MODELS = {
    "Qwen2.5-0.5B": (24, NORMS + MLP + ATTENTION + BIASES, False),
    "Qwen2.5-14B": (48, NORMS + MLP + ATTENTION + BIASES, True),
    "Llama-3.1-8B": (32, NORMS + MLP + ATTENTION, True),
    "Llama-3.1-70B": (80, NORMS + MLP + ATTENTION, True),
    "Qwen3-30B-A3B": (48, (*NORMS, *EXPERTS, *ATTENTION, "mlp.gate.weight"), True),
}
"""Number of layers, their tensors, and whether there is an untied head."""
VERSION_1 = "4f5456f91959a5fa49badfc1ce9fa04aeae9f8a886d684a6622b2ea74f48c848"
"""Fingerprint of `small`, as version 1 wrote it."""


def kind(name: str) -> str:
    return re.sub(r"\.\d+", "", name)


def write(file: Path, model: str) -> dict[str, torch.Tensor]:
    num_layers, parts, has_head = MODELS[model]
    names = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight", *["lm_head.weight"] * has_head]
    generator = torch.Generator().manual_seed(0)
    shapes = {name: (6, 20) if "proj.weight" in name or "embed" in name else (12,) for name in names}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, file)
    return tensors


def changed(file: Path, tensors: dict[str, torch.Tensor], chosen: Callable[[str], bool]) -> str:
    """Fingerprint with other values of the chosen tensors."""
    other = {name: tensor + 1 if chosen(name) else tensor for name, tensor in tensors.items()}
    assert any(map(chosen, tensors))
    save_file(other, file)
    return fingerprint(str(file.parent))


@pytest.mark.parametrize("model", MODELS)
def test_each_kind_of_tensor_is_read(model: str, tmp_path: Path):
    """At even distances of the sorted names, version 1 read only `v_proj.bias` and the head of Qwen2.5-14B."""
    file = tmp_path / "model.safetensors"
    tensors = write(file, model)
    before = fingerprint(str(tmp_path))
    assert before == fingerprint(str(tmp_path))
    unread = [
        one for one in {kind(n) for n in tensors} if changed(file, tensors, lambda n, k=one: kind(n) == k) == before
    ]
    assert not unread


def test_each_layer_of_a_dense_model_and_every_other_expert_are_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    tensors = write(file, "Llama-3.1-70B")
    before = fingerprint(str(tmp_path))
    for layer in (0, 39, 79):
        assert changed(file, tensors, lambda name, layer=layer: f"layers.{layer}.mlp.down_proj" in name) != before
    tensors = write(file, "Qwen3-30B-A3B")
    before = fingerprint(str(tmp_path))
    for odd in (0, 1):
        of_half = re.compile(rf"experts\.({'|'.join(str(expert) for expert in range(odd, 16, 2))})\.up_proj")
        assert changed(file, tensors, lambda name, half=of_half: bool(half.search(name))) != before


@pytest.mark.parametrize("row", [0, 500, 999])
def test_values_are_read_from_the_first_to_the_last(row: int, tmp_path: Path):
    tensor = torch.zeros(1000, 8)
    save_file(
        {"embed.weight": tensor, "scale": torch.tensor(1.0), "empty": torch.zeros(0, 2)}, tmp_path / "a.safetensors"
    )
    before = fingerprint(str(tmp_path))
    tensor[max(0, row - 16) : row + 17] = 1
    save_file(
        {"embed.weight": tensor, "scale": torch.tensor(1.0), "empty": torch.zeros(0, 2)}, tmp_path / "a.safetensors"
    )
    assert fingerprint(str(tmp_path)) != before


def test_values_of_other_types_are_compared_bit_by_bit(tmp_path: Path):
    save_file(
        {"packed": torch.arange(64, dtype=torch.int32).view(8, 8), "one": torch.tensor(3)}, tmp_path / "a.safetensors"
    )
    before = fingerprint(str(tmp_path))
    save_file(
        {"packed": torch.arange(64, dtype=torch.int32).view(8, 8), "one": torch.tensor(4)}, tmp_path / "a.safetensors"
    )
    assert fingerprint(str(tmp_path)) != before


def small(folder: Path) -> None:
    tensors = {f"layers.{i}.weight": (torch.arange(12, dtype=torch.float32) + i).view(3, 4) / 7 for i in range(40)}
    save_file(tensors | {"scale": torch.tensor(1.0)}, folder / "model.safetensors")


def test_a_fingerprint_of_version_1_is_compared_by_its_rule(tmp_path: Path):
    small(tmp_path)
    assert fingerprint(str(tmp_path)) != VERSION_1 and matches(VERSION_1, str(tmp_path))
    assert matches(fingerprint(str(tmp_path)), str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert not matches(VERSION_1, str(tmp_path))
