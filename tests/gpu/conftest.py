"""Tests that need GPUs: `@pytest.mark.gpus(n)`. Without n GPUs a test is skipped with that reason.

    python -m pytest tests/gpu -q                  # all that this machine has the GPUs for
    python -m pytest tests/gpu -q --gpus 2         # only those that need exactly two
    python -m pytest tests/gpu -q --gpus 2 -n 8    # eight at once (pytest-xdist): most of the time is importing

With --gpus and -n each worker sees only as many GPUs as its tests need, others than its neighbour's while there are
some. Tests that watch a whole device's memory (`@pytest.mark.alone`) wait until the others on their GPUs have ended.

They build on the models and jobs of tests/support.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

JOBS = ("test_job", "test_fp8", "test_offload", "test_stock_server")
"""Files of whole jobs. They take the longest, so they run first; but those that run alone on a GPU come last, when
nobody has to wait for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", type=int, help="only the tests that need exactly this many GPUs")


def pytest_configure(config: pytest.Config) -> None:
    wanted, worker = config.getoption("--gpus"), os.environ.get("PYTEST_XDIST_WORKER")
    if wanted and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share(visible(), wanted, int(worker.removeprefix("gw"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present, wanted = len(visible()), config.getoption("--gpus")
    if wanted is not None:
        others = [item for item in items if needed(item) != wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if needed(item) == wanted]
    items.sort(key=lambda item: (item.get_closest_marker("alone") is not None, item.path.stem not in JOBS))
    for item in items:
        if needed(item) > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed(item)} GPUs, {present} here"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Nobody else's tests run on the GPUs of one that is `alone`. Waiting for that is no part of a test's timeout.

    Locks of this machine and user. Who waits for one keeps the door to it shut, so that those who came later do not
    pass; all take their GPUs in the order of their numbers, so nobody waits for another in a circle.
    """
    kind = fcntl.LOCK_SH if item.get_closest_marker("alone") is None else fcntl.LOCK_EX
    with contextlib.ExitStack() as held:
        for gpu in visible()[: needed(item)]:
            with lock(f"door_{gpu}").open("w") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                fcntl.flock(held.enter_context(lock(gpu).open("w")), kind)
        return (yield)


@pytest.fixture
def gpus() -> list[str]:
    """What to write into CUDA_VISIBLE_DEVICES, for each GPU that this test may use."""
    return visible()


def lock(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"skyrl_train_gpu_{name}_{os.getuid()}.lock")


def visible() -> list[str]:
    """Numbers (or names) of the GPUs that this process may use; tests take the first that they need."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = torch.cuda.device_count()
    return [str(number) for number in range(present)] if given is None else given.split(",")[:present]


def share(gpus: list[str], wanted: int, worker: int) -> list[str]:
    """The GPUs of one worker: `wanted` of them, in turn; all where there are not so many."""
    first = worker % max(1, len(gpus) // wanted) * wanted
    return gpus[first : first + wanted]


def needed(item: pytest.Item) -> int:
    """GPUs."""
    marker = item.get_closest_marker("gpus")
    return 0 if marker is None else marker.args[0]
