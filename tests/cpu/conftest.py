"""One thread per process, no compiler, no network: set before torch is imported, inherited by every child."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import pytest

from tests.support import quick_configs
from tests.support.job_server import SERVER

quick_configs.install()

# Until all tests are collected: looking through what vLLM, Megatron and transformers define, again and again, took 9 of
# 22 s.
gc.disable()

LONGEST = ("jobs", "test_service.py", "test_main_sft.py", "test_sync_end_to_end.py")
"""Folders and files of few tests that each take minutes."""

# A shell starts what ends with `&` with Ctrl-C ignored, and so would be all that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that none of them is left over for one of two workers: whole runs, then by the
    number of slow tests, then by the number of tests."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    num_tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            not set(LONGEST) & set(item.path.parts[-2:]),
            -num_slow[item.path],
            -num_tests[item.path],
            str(item.path),
        )
    )


def pytest_collection_finish() -> None:
    """Leave what the imports made to the process's end, so that no test's `gc.collect()` looks through it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests() -> Iterator[None]:
    """Fail the session if it leaves a child process behind, and end what is left."""
    yield
    SERVER.close()
    left = [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in _command(p)]
    _, alive = psutil.wait_procs(left, timeout=60)
    names = [f"{p.pid}: {_command(p)[:120]}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert not names, "processes left behind by the tests: " + "; ".join(names)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also a zombie, which waits only for its parent
        return "resource_tracker"


@pytest.fixture(autouse=True)
def default_log_levels() -> None:
    """Log warnings, whatever a library that an earlier test imported has set for the root logger."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("skyrl_train").setLevel(logging.NOTSET)
