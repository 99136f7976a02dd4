"""LoRA adapters in PEFT's format: modules, tensors, initial values and files.

Everything follows from the names and shapes in a checkpoint's headers. A module with weight W [out, in] gets `lora_A`
[r, in] and `lora_B` [out, r], r the rank, and computes (W + alpha / r * B A) x.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.config.policy import LoraConfig
from skyrl_train.hf.checkpoint import tensor_shapes
from skyrl_train.hf.fingerprint import fingerprint
from skyrl_train.hf.tensor_file import save_tensors

ALL_LINEAR = "all-linear"
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "base_model_fingerprint"
NOT_ADAPTED = re.compile(r"(^|\.)(mlp|block_sparse_moe)\.gate\.weight$|\.shared_expert_gate\.weight$")
"""Routers and gates of shared experts, for which vLLM has no LoRA."""
SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's LoRA slots (0.26 to 0.33)."""

Shapes = Mapping[str, tuple[int, int]]
"""Module -> (out, in) of its weight."""


def tensor_names(module: str) -> tuple[str, str]:
    """Names of a module's A and B in PEFT's file."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def linear_shapes(folder: str) -> dict[str, tuple[int, int]]:
    """The linear layers of the checkpoint in `folder` that can be adapted, in the order of the layers.

    Raises: ValueError if the folder has no safetensors files.
    """
    shapes: dict[str, tuple[int, int]] = {}
    num_layers = json.loads(Path(folder, "config.json").read_text()).get("num_hidden_layers", math.inf)
    for name, shape in tensor_shapes(folder).items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) >= num_layers or not name.endswith(".weight") or NOT_ADAPTED.search(name):
            continue
        if len(shape) == 2:
            shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return dict(sorted(shapes.items(), key=lambda item: in_order(item[0])))


def targets(shapes: Shapes, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """The modules that `target_modules` names and `exclude_modules` does not, with their shapes.

    An entry is a name, the end of one after a dot, or a regular expression for either.
    Raises: ValueError for an entry that matches no module, or if nothing is left.
    """
    chosen = _matched("target_modules", lora.target_modules, shapes)
    left = chosen - _matched("exclude_modules", lora.exclude_modules or (), shapes)
    if not left:
        raise ValueError(
            "trainer.policy.model.lora.exclude_modules excludes every module of target_modules. Remove an entry"
        )
    return {name: shape for name, shape in shapes.items() if name in left}


def _matched(key: str, entries: Iterable[str], shapes: Shapes) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        if entry == ALL_LINEAR:
            found |= shapes.keys()
            continue
        try:
            pattern = re.compile(rf"(.*\.)?({entry})")
        except re.error as error:
            raise ValueError(
                f"trainer.policy.model.lora.{key} contains {entry!r}: not a regular expression ({error})"
            ) from None
        hits = {name for name in shapes if pattern.fullmatch(name)}
        if not hits:
            raise ValueError(
                f"trainer.policy.model.lora.{key} contains {entry!r}: it matches no linear layer of the model. Choose "
                f"from {', '.join(_leaves(shapes))}"
            )
        found |= hits
    return found


def _leaves(shapes: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in shapes})


def slot_problem(rank: int, modules: Iterable[str] = ()) -> str | None:
    """Why vLLM could not serve an adapter of these modules, or None."""
    key, remedy = "trainer.policy.model.lora", "trainer.policy.model.lora.sync=merged"
    if rank > SLOT_RANKS[-1]:
        return f"{key}.rank is {rank}: vLLM has slots up to {SLOT_RANKS[-1]}. Lower it, or set {remedy}"
    # vLLM splits this weight when it loads the model (mla_attention.py) and computes with the parts, or with the layer
    # without its slot: the adapter would never be served (vllm#48974, 0.26 to 0.33).
    if any(module.endswith(".kv_b_proj") for module in modules):
        return (
            f"{key}.target_modules includes kv_b_proj: vLLM would not serve its adapter. Set "
            f"{key}.exclude_modules=[kv_b_proj], or {remedy}"
        )
    return None


def initial_factors(module: str, shape: tuple[int, int], lora: LoraConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Initial A [r, in] and B [out, r] (zeros), float32 on the CPU.

    They depend on the module's name and the seed alone, so they are equal in every layout.
    """
    out_size, in_size = shape
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed} {module}".encode()).digest()[:7], "big")
    )
    a = torch.empty(lora.rank, in_size, dtype=torch.float32)
    if lora.init_method == "kaiming":
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    elif lora.init_method == "xavier":
        torch.nn.init.xavier_uniform_(a, generator=generator)
    else:
        assert lora.init_method == "normal", lora.init_method
        torch.nn.init.normal_(a, std=1 / lora.rank, generator=generator)
    return a, torch.zeros(out_size, lora.rank, dtype=torch.float32)


def identity_adapter(folder: str, lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, tensor) of an adapter that does not change the model, float32 on the CPU. A, of which one number is
    in memory, takes the mean of its input; B is zero.
    """
    for module, (out_size, in_size) in targets(linear_shapes(folder), lora).items():
        factors = torch.tensor(1 / in_size).expand(lora.rank, in_size), torch.zeros(out_size, lora.rank)
        yield from zip(tensor_names(module), factors, strict=True)


def peft_config(folder: str, base_model: str, lora: LoraConfig) -> dict[str, Any]:
    """Contents of adapter_config.json. Args: folder: of the base model; base_model: its name, for readers."""
    shapes = linear_shapes(folder)
    chosen = targets(shapes, lora)
    names = set(_leaves(chosen))
    if {name for name in shapes if name.rpartition(".")[2] in names} != chosen.keys():
        names = set(chosen)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def save(target: str | Path, tensors: Mapping[str, Tensor], folder: str, base_model: str, lora: LoraConfig) -> None:
    """Write an adapter in PEFT's format. Files get their names when they are complete."""
    path = Path(target)
    path.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", FINGERPRINT: fingerprint(folder)}
    save_tensors(path / "tensors.tmp", {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    _order_header(path / "tensors.tmp")
    (path / "config.tmp").write_text(json.dumps(peft_config(folder, base_model, lora), indent=2))
    (path / "tensors.tmp").rename(path / TENSORS_FILE)
    (path / "config.tmp").rename(path / CONFIG_FILE)


def _order_header(file: Path) -> None:
    """Sort the metadata of a safetensors file, whose order is random (safetensors 0.8), so that equal adapters have
    equal digests.
    """
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(ordered) <= size, "compact JSON with other values"
        stream.seek(8)
        stream.write(ordered.ljust(size))


def in_order(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
