"""Tests that share GPUs take turns (tests/gpu/conftest.py); here with a GPU that is only named."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

CONFTEST = Path(__file__).parents[2] / "gpu/conftest.py"
A_TEST = """
import pytest

@pytest.mark.gpus(1)
@pytest.mark.timeout(1)
def test_that_is_quick():
    pass
"""


def test_waiting_for_a_gpu_does_not_count_as_time_of_the_test(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text() + "\n\ndef visible():\n    return ['0']\n")
    (tmp_path / "test_quick.py").write_text(A_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir=.", "."]
    with Path(tmp_path, f"skyrl_train_gpu_0_{os.getuid()}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tests = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
        door = tmp_path / f"skyrl_train_gpu_door_0_{os.getuid()}.lock"
        deadline = time.monotonic() + 60
        while not door.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2)
        assert tests.poll() is None, "it does not wait"
    output, _ = tests.communicate(timeout=60)
    assert tests.returncode == 0 and "1 passed" in output, output
