"""Tests that need GPUs: `@pytest.mark.gpus(n)`. Without n GPUs a test is skipped with that reason.

    python -m pytest tests/gpu -q            # all that this machine has the GPUs for
    python -m pytest tests/gpu -q -n 4       # four at once (pytest-xdist): most of the time is importing

They build on the models and jobs of tests/cpu.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parents[1] / "cpu"), str(Path(__file__).parents[2])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    present = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpus")
        if marker is not None and marker.args[0] > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, {present} here"))
