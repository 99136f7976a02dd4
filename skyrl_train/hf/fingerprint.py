"""Recognise the weights of a model folder by a few of their values, without reading them all."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.hf.checkpoint import by_file, opened, tensor_files, tensor_shapes

VERSION = "2:"
"""First characters of a fingerprint. Those of version 1 have none: it read one kind of tensor of many models."""
MOST_OF_KIND = 128
"""Tensors that are read of each kind, such as `q_proj.weight`: every layer, and some experts of each."""
LOCATIONS = 64
"""Locations that are read of a kind; at least `LEAST` of each tensor."""
LEAST, WIDTH = 3, 8
"""Locations in a tensor, and adjacent values at each."""
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of safetensors that are compared in bfloat16; others have to be equal."""


def fingerprint(folder: str) -> str:
    """Digest of the names and shapes of all tensors, and of values of each kind of tensor, rounded to bfloat16: models
    in another floating-point type or in other files have the same.

    Raises: ValueError like `tensor_shapes`.
    """
    shapes = tensor_shapes(folder)
    kinds: dict[str, list[str]] = {}
    for name in shapes:
        kinds.setdefault(re.sub(r"\b\d+\b", "", name), []).append(name)
    locations: dict[str, int] = {}
    for names in kinds.values():
        # In the order of their digests: at even distances of a sorted list it would be one expert of each layer.
        chosen = sorted(names, key=_digest)[:MOST_OF_KIND]
        locations |= dict.fromkeys(chosen, max(LEAST, LOCATIONS // len(chosen)))
    read: dict[str, str] = {}
    for file, held in by_file(tensor_files(folder)):
        read |= _values(file, {name: locations[name] for name in held if name in locations})
    return VERSION + _digest(repr([(name, shapes[name], read.get(name)) for name in sorted(shapes)]))


def matches(mark: str, folder: str) -> bool:
    """Whether the folder has the weights of this fingerprint, which may be of version 1. Raises: like `fingerprint`."""
    return mark == (fingerprint(folder) if mark.startswith(VERSION) else _first_rows(folder))


def _values(file: Path, locations: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Tensor -> digest of the values at so many locations, at even distances from its first value to its last.

    Read with seek: the first access to a page of a mapped file took 4 ms, because neighbours were read with it.
    """
    with file.open("rb", buffering=0) as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        for name, number in locations.items():
            begin, end = header[name]["data_offsets"]
            value_bytes = max(1, (end - begin) // max(1, math.prod(header[name]["shape"])))
            num_values = (end - begin) // value_bytes
            digest = hashlib.sha256()
            for index in range(number):
                value = max(0, num_values - WIDTH) * index // (number - 1)
                stream.seek(8 + size + begin + value * value_bytes)
                found = bytearray(stream.read(min(WIDTH, num_values) * value_bytes))
                dtype = FLOATS.get(header[name]["dtype"])
                digest.update(_rounded(torch.frombuffer(found, dtype=dtype)) if found and dtype else found)
            yield name, digest.hexdigest()


def _first_rows(folder: str) -> str:
    """Fingerprint of version 1."""
    shapes = tensor_shapes(folder)
    names = sorted(name for name, shape in shapes.items() if shape)
    chosen = set(names[:: max(1, len(names) // 16)])
    rows: dict[str, bytes] = {}
    for file, held in by_file(tensor_files(folder)):
        if sampled := chosen.intersection(held):
            with opened(file) as tensors:
                rows |= {name: _rounded(tensors.get_slice(name)[:1]) for name in sampled}
    return _digest(repr([(name, shapes[name], rows.get(name)) for name in names]))


def _rounded(values: Tensor) -> bytes:
    return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
