"""Files of tensors."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file that has the mode of any new file: by default only its owner can read it (0.8)."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    safetensors.torch.save_file(dict(tensors), path, metadata=dict(metadata))
    with contextlib.suppress(OSError):  # a file system without modes
        path.chmod(mode)
