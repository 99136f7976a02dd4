"""What stands in a Hugging Face checkpoint: from the headers of its files, without a weight beyond a few bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUM_SAMPLED = 16
"""Tensors of which the fingerprint reads the first row."""


def tensor_files(folder: str) -> dict[str, Path]:
    """Tensor -> the safetensors file that holds it; empty where the folder has none.

    As the index says; without one `model.safetensors`, or else all files. Others are left out: some repositories
    (Mistral's) keep the same weights a second time, in `consolidated.safetensors` under names of their own.

    Raises: ValueError if a file of the index is missing.
    """
    root = Path(folder)
    if (root / INDEX).is_file():
        files = {name: root / file for name, file in json.loads((root / INDEX).read_text())["weight_map"].items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise ValueError(
                f"{folder} lacks {len(missing)} files that its {INDEX} names, the first is {missing[0]}: copy or "
                "download the checkpoint again"
            )
        return files
    found = [root / SINGLE] if (root / SINGLE).is_file() else sorted(root.glob("*.safetensors"))
    files = {}
    for file in found:
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def tensor_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Raises: ValueError if the folder has no safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(tensor_files(folder)):
        with safe_open(file, "pt") as tensors:
            for name in names:
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    if not shapes:
        raise ValueError(f"{folder} has no .safetensors files, which say the names and shapes of the layers")
    return shapes


def fingerprint(folder: str) -> str:
    """Tells models apart: names and shapes of all tensors, and the first row of some, rounded to bfloat16."""
    shapes = tensor_shapes(folder)
    names = sorted(name for name, shape in shapes.items() if shape)
    chosen = set(names[:: max(1, len(names) // NUM_SAMPLED)])
    rows: dict[str, bytes] = {}
    for file, held in _by_file(tensor_files(folder)):
        if sampled := chosen.intersection(held):
            with safe_open(file, "pt") as tensors:
                for name in sampled:
                    row = tensors.get_slice(name)[:1].to(torch.bfloat16).contiguous()
                    rows[name] = row.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr([(name, shapes[name], rows.get(name)) for name in names]).encode()).hexdigest()


def _by_file(files: dict[str, Path]) -> Iterator[tuple[Path, Iterable[str]]]:
    of_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        of_file.setdefault(file, []).append(name)
    yield from of_file.items()
