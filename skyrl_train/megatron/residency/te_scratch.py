"""What Transformer Engine keeps on the device between steps, beside the model."""

from __future__ import annotations

import sys

GRADIENTS = ("transformer_engine.pytorch.module.base", "_dummy_wgrads")
"""Module and name of {shape and dtype: a tensor that stands for a gradient which was added to Megatron's buffer}."""
WORKSPACES = ("transformer_engine.pytorch.cpp_extensions.gemm", "get_cublas_workspace", "_get_grouped_cublas_workspace")
"""Module and names of cached functions that make cuBLAS's workspaces."""


def free() -> None:
    """Forget it, where Transformer Engine (2.20; other versions may have other names) was imported.

    Its next step makes it again. It is 0.15 GiB of a policy of half a billion parameters.
    """
    module, stand_ins = GRADIENTS
    getattr(sys.modules.get(module), stand_ins, {}).clear()
    module, *makers = WORKSPACES
    for maker in makers:
        getattr(getattr(sys.modules.get(module), maker, None), "cache_clear", lambda: None)()
