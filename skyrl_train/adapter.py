"""LoRA adapters as PEFT keeps them: which modules, which tensors, on disk, and for which model.

Everything here follows from the names and shapes in a checkpoint's headers, so no weight of the base model is read
beyond a few bytes. Legend: r rank; a module with weight W [out, in] gets `lora_A` [r, in] and `lora_B` [out, r] and
computes (W + alpha / r * B A) x.
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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_train.checkpoint import fingerprint, tensor_shapes
from skyrl_train.config import LoraConfig

ALL_LINEAR = "all-linear"
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "base_model_fingerprint"
NOT_ADAPTED = re.compile(r"(^|\.)(mlp|block_sparse_moe)\.gate\.weight$|\.shared_expert_gate\.weight$")
"""Routers and the gate of a shared expert: one number per expert decides where a token goes, and vLLM has no LoRA for
them."""

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
    return dict(sorted(shapes.items(), key=lambda item: _natural(item[0])))


def targets(shapes: Shapes, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """The modules that `target_modules` names and `exclude_modules` does not, with their shapes.

    An entry is a whole name, the end of one after a dot, or a regular expression for either.

    Raises: ValueError for an entry that matches no module, or if nothing is left.
    """
    chosen = _matched("target_modules", lora.target_modules, shapes)
    left = chosen - _matched("exclude_modules", lora.exclude_modules or (), shapes)
    if not left:
        raise ValueError("trainer.policy.model.lora.exclude_modules excludes every module of target_modules")
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
            raise ValueError(f"trainer.policy.model.lora.{key} has {entry!r}, no regular expression: {error}") from None
        hits = {name for name in shapes if pattern.fullmatch(name)}
        if not hits:
            raise ValueError(
                f"trainer.policy.model.lora.{key} has {entry!r}, which matches no linear layer of the model; it has "
                f"{', '.join(_leaves(shapes))}"
            )
        found |= hits
    return found


def _leaves(shapes: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in shapes})


def initial_factors(module: str, shape: tuple[int, int], lora: LoraConfig, seed: int) -> tuple[Tensor, Tensor]:
    """A [r, in] by the init method and B [out, r] of zeros, float32 on the CPU.

    They depend on the module's name and the seed alone, so every layout, and the engine, makes the same ones.
    """
    out_size, in_size = shape
    generator = torch.Generator().manual_seed(int.from_bytes(_sha(f"{seed} {module}".encode())[:7], "big"))
    a = torch.empty(lora.rank, in_size, dtype=torch.float32)
    if lora.init_method == "kaiming":
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    elif lora.init_method == "xavier":
        torch.nn.init.xavier_uniform_(a, generator=generator)
    else:
        assert lora.init_method == "normal", lora.init_method
        torch.nn.init.normal_(a, std=1 / lora.rank, generator=generator)
    return a, torch.zeros(out_size, lora.rank, dtype=torch.float32)


def identity_adapter(folder: str, lora: LoraConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, tensor) of the adapter that training starts from, which changes nothing yet; on the CPU."""
    for module, shape in targets(linear_shapes(folder), lora).items():
        yield from zip(tensor_names(module), initial_factors(module, shape, lora, seed), strict=True)


def peft_config(folder: str, base_model: str, lora: LoraConfig) -> dict[str, Any]:
    """What adapter_config.json holds. Args: folder has the base model; base_model is its name for the reader."""
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
    """Write an adapter as PEFT does. Files appear under their names only when they are whole."""
    path = Path(target)
    path.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", FINGERPRINT: fingerprint(folder)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "tensors.tmp", metadata=metadata)
    (path / "config.tmp").write_text(json.dumps(peft_config(folder, base_model, lora), indent=2))
    (path / "tensors.tmp").rename(path / TENSORS_FILE)
    (path / "config.tmp").rename(path / CONFIG_FILE)


def check(folder: str, lora: LoraConfig) -> None:
    """Raises: ValueError if targets match nothing in the base model at `folder`, or the adapter does not fit it."""
    if lora.rank > 0:
        targets(linear_shapes(folder), lora)
        if lora.path is not None:
            AdapterFile(lora.path, folder, lora)


class AdapterFile:
    """An adapter on disk that fits the base model and the configuration; tensors are read one by one."""

    def __init__(self, adapter: str, folder: str, lora: LoraConfig) -> None:
        """Args: adapter: folder in PEFT's format; folder: the base model's.

        Raises: ValueError if it is not there, is for another model, has another rank or alpha, kinds of LoRA that are
            not built, or other modules or shapes than configured.
        """
        self.path = Path(adapter).expanduser()
        missing = [name for name in (CONFIG_FILE, TENSORS_FILE) if not (self.path / name).is_file()]
        if missing:
            raise ValueError(f"adapter {adapter} has no {' and no '.join(missing)}: give a folder in PEFT's format")
        self._check_config(json.loads((self.path / CONFIG_FILE).read_text()), lora)
        with safe_open(self.path / TENSORS_FILE, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            made_for = (file.metadata() or {}).get(FINGERPRINT)
        if made_for is not None and made_for != fingerprint(folder):
            raise ValueError(f"adapter {adapter} was trained on another base model than {folder}: their weights differ")
        self._check_tensors(found, folder, lora)

    def _check_config(self, config: dict[str, Any], lora: LoraConfig) -> None:
        key = "trainer.policy.model.lora"
        for name, mine, value in (("r", lora.rank, "rank"), ("lora_alpha", lora.alpha, "alpha")):
            if config.get(name) != mine:
                raise ValueError(f"adapter {self.path} has {name}={config.get(name)} and {key}.{value} is {mine}")
        if config.get("peft_type") != "LORA":
            raise ValueError(f"adapter {self.path} is of the type {config.get('peft_type')!r}; only LORA is built")
        for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
            if config.get(name):
                raise ValueError(f"adapter {self.path} has {name}={config[name]!r}, which is not built")
        if config.get("bias", "none") != "none":
            raise ValueError(f"adapter {self.path} has bias={config['bias']!r}; only none is built")

    def _check_tensors(self, found: Mapping[str, tuple[int, ...]], folder: str, lora: LoraConfig) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for module, (out_size, in_size) in targets(linear_shapes(folder), lora).items():
            expected |= zip(tensor_names(module), ((lora.rank, in_size), (out_size, lora.rank)), strict=True)
        if missing := sorted(expected.keys() - found.keys(), key=_natural):
            raise ValueError(f"adapter {self.path} lacks tensors of {folder}: {_some(missing)}")
        if extra := sorted(found.keys() - expected.keys(), key=_natural):
            raise ValueError(
                f"adapter {self.path} has tensors that no target of {folder} takes: {_some(extra)}; see "
                "trainer.policy.model.lora.target_modules"
            )
        for name, shape in expected.items():
            if found[name] != shape:
                raise ValueError(
                    f"adapter {self.path} is for another model than {folder}: {name} has the shape {found[name]}, not "
                    f"{shape}"
                )

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] as they are stored."""
        with safe_open(self.path / TENSORS_FILE, "pt") as file:
            a, b = tensor_names(module)
            return file.get_tensor(a), file.get_tensor(b)


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
