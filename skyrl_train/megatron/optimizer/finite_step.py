"""An optimizer step that a gradient which is not finite cannot spoil.

Megatron itself (0.16 and 0.19) looks for infinities only where it scales the loss, which is in float16; in bfloat16 and
float32 one NaN would become every weight.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any


def step_if_finite(optimizer: Any) -> float:
    """One step of Megatron's optimizer, left out where the gradient is not finite.

    All ranks see the same norm, so all of them step or none. Returns: the gradient's norm before clipping.
    """
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    if math.isfinite(norm):
        with _both_done(optimizer, norm):
            optimizer.step()
    return float(norm)


@contextlib.contextmanager
def _both_done(optimizer: Any, norm: Any) -> Iterator[None]:
    """`step` begins with the same two calls, which work through every parameter: experts have thousands."""
    optimizer.prepare_grads, optimizer.get_grad_norm = (lambda: False), (lambda: norm)
    try:
        yield
    finally:
        del optimizer.prepare_grads, optimizer.get_grad_norm
