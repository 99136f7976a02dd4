"""Tests that need GPUs: `@pytest.mark.gpus(n)`. Without n GPUs a test is skipped with that reason.

    python -m pytest tests/gpu -q            # all that this machine has the GPUs for
    python -m pytest tests/gpu -q -n 4       # four at once (pytest-xdist): most of the time is importing
    python -m pytest tests/gpu/test_offload.py  # but not these: they, and vLLM's sleep, watch the whole device's memory
    python -m pytest tests/gpu -q --gpus 2   # only those that need exactly two

They build on the models and jobs of tests/cpu.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", type=int, help="only the tests that need exactly this many GPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    present, wanted = torch.cuda.device_count(), config.getoption("--gpus")
    if wanted is not None:
        others = [item for item in items if needed(item) != wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if needed(item) == wanted]
    for item in items:
        if needed(item) > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed(item)} GPUs, {present} here"))


def needed(item: pytest.Item) -> int:
    """GPUs."""
    marker = item.get_closest_marker("gpus")
    return 0 if marker is None else marker.args[0]
