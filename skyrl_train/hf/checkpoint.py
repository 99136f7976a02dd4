"""Contents of a Hugging Face checkpoint, from the headers of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SUMS = "SHA256SUMS"
"""Digests of all other files of an export, for `sha256sum -c SHA256SUMS`."""
PART = re.compile(r"-of-0*(?:[2-9]|[1-9]\d+)\.safetensors$")
COPY_AGAIN = "Copy or download the checkpoint again"


def tensor_files(folder: str) -> dict[str, Path]:
    """Tensor -> its safetensors file; empty if the folder has none.

    From the index; without one `model.safetensors`, else all files. Other files are skipped: Mistral's repositories
    hold the weights a second time, in `consolidated.safetensors` with other names.
    Raises: ValueError if the index cannot be read or names a missing file, a file is not complete, or the folder holds
        tensors twice: transformers prefers `model.safetensors`, vLLM the index, and without one it loads all files.
    """
    root = Path(folder)
    has_single = (root / SINGLE).is_file()
    if (root / INDEX).is_file():
        files = {name: root / file for name, file in _weight_map(root / INDEX).items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise ValueError(
                f"{folder} lacks {len(missing)} files that its {INDEX} names, the first is {missing[0]}. {COPY_AGAIN}"
            )
        if has_single and root / SINGLE not in files.values():
            raise ValueError(
                f"{folder} has two sets of weights: {SINGLE}, and the files that {INDEX} names. Programs differ in "
                f"which they load. Remove {SINGLE}, or the index and its files"
            )
        return files
    if not has_single and (part := next(filter(PART.search, map(str, root.glob("[!.]*.safetensors"))), None)):
        raise ValueError(
            f"{folder} has parts of a checkpoint ({Path(part).name}) and no {INDEX}: while an export replaces another "
            f"they may be of both. {COPY_AGAIN}, or export it again"
        )
    files = {}
    for file in sorted(root.glob("[!.]*.safetensors")):
        with opened(file) as tensors:
            held = dict.fromkeys(tensors.keys(), file)
        if twice := sorted(held.keys() & files.keys()):
            raise ValueError(
                f"{folder} has {len(twice)} tensors twice: {twice[0]} is in {files[twice[0]].name} and in {file.name}. "
                "Programs differ in which they load. Remove one of the files"
            )
        files |= held
    return {name: file for name, file in files.items() if file.name == SINGLE or not has_single}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        if all(isinstance(file, str) for file in files.values()):
            return files
        raise ValueError("weight_map names something that is not a file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of tensors ({type(error).__name__}: {error}). {COPY_AGAIN}"
        ) from error


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The tensors of a safetensors file. Raises: ValueError if it is truncated, damaged or of another format, or cannot
    be read.
    """
    try:
        file.open("rb").close()  # safetensors reports a file without permission as missing
        tensors = safe_open(file, "pt")
    except PermissionError as error:
        raise ValueError(f"{file} cannot be read ({error}). Change its permissions") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}). {COPY_AGAIN}") from error
    with tensors as readable:
        yield readable


def tensor_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name.

    Raises: ValueError if safetensors files are missing, damaged or not as in the index, or one has other values for a
        tensor of another: vLLM and transformers load all that a file holds, Megatron what the index names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = tensor_files(folder)
    for file, names in by_file(files):
        with opened(file) as tensors:
            held = set(tensors.keys())
            if absent := [name for name in names if name not in held]:
                raise ValueError(
                    f"{file} lacks {len(absent)} tensors that {INDEX} lists, the first is {absent[0]}. {COPY_AGAIN}"
                )
            for name in sorted(name for name in held if files.get(name, file) != file):
                with opened(files[name]) as others:
                    is_there = name in set(others.keys())  # else that file is refused
                    if not is_there or _are_equal(others.get_tensor(name), tensors.get_tensor(name)):
                        continue
                raise ValueError(
                    f"{file} holds other values of {name} than {files[name].name}, where {INDEX} says that it is. "
                    "Programs differ in which they load. Save the model again with save_pretrained, or download it"
                )
            for name in names:
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    if not shapes:
        raise ValueError(f"{folder} has no .safetensors files. Save the model with save_pretrained, which writes them")
    return shapes


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes; their dtype may be one without arithmetic."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def export_sum(folder: Path) -> str | None:
    """Digest of an export's files, by which it is recognised; None if the folder holds no complete export."""
    sums = folder / SUMS
    return hashlib.sha256(sums.read_bytes()).hexdigest() if sums.is_file() and (folder / INDEX).exists() else None


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names, for an error."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def by_file(files: dict[str, Path]) -> Iterator[tuple[Path, Iterable[str]]]:
    """Names of the tensors in each file."""
    of_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        of_file.setdefault(file, []).append(name)
    yield from of_file.items()
