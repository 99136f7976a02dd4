"""Tensors of a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                assert name not in found, f"{name} is in two files"
                found[name] = tensors.get_tensor(name)
    return found
