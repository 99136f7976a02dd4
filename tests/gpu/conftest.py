"""Tests that need GPUs: `@pytest.mark.gpus(n)`. Without n GPUs a test is skipped with that reason."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    present = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpus")
        if marker is not None and marker.args[0] > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, {present} here"))
