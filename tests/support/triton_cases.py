"""What tests of Triton kernels have in common.

They need one GPU; with `TRITON_INTERPRET=1` they run on the CPU where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = [] if INTERPRETED else [pytest.mark.gpus(1)]
"""A module's `pytestmark`."""
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest difference to float64, relative to the largest value."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Args: theirs in float64."""
    assert mine.shape == theirs.shape
    if theirs.numel():
        scale = float(theirs.abs().max().clamp(min=1e-6))
        assert float((mine.detach().double() - theirs).abs().max()) <= ROUNDING[dtype] * scale
