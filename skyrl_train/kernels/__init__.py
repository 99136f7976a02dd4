"""Triton kernels of the torch layers and of the weight digest: tensors in, tensors out, without autograd.

Each function launches one kernel on CUDA tensors of any float dtype up to 32 bits, computes in float32 and rounds once.
Sizes that change between micro-batches are ordinary arguments, so they cause no recompilation; a kernel compiles in
about a second, once per machine (Triton's cache). `TRITON_INTERPRET=1` runs them on the CPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def serve(tensor: Tensor) -> bool:
    """Whether the kernels support the tensor; otherwise the caller uses plain torch."""
    return tensor.is_cuda or INTERPRETED
