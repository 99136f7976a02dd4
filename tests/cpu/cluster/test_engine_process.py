"""What is left of an engine is killed, and what its processes have named goes with them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skyrl_train.cluster.pool.engine_process import EngineProcess, kill_processes

HOLD_A_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name.strip("/"), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="where POSIX semaphores are files")
@pytest.mark.parametrize("starting", [False, True], ids=["the tracker runs", "the tracker has no command line yet"])
def test_named_semaphores_are_removed_with_the_processes_that_held_them(monkeypatch, starting):
    """multiprocessing's resource tracker does it, if it is not killed with the others."""
    with subprocess.Popen([sys.executable, "-c", HOLD_A_SEMAPHORE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file = Path("/dev/shm", f"sem.{process.stdout.readline().strip()}")
        assert file.exists()
        held = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        assert len(held) == 2, "the process and its tracker"
        if starting:
            read = psutil.Process.cmdline
            monkeypatch.setattr(psutil.Process, "cmdline", lambda one: [] if one == held[1] else read(one))
        kill_processes(tuple((one.pid, one.create_time()) for one in held))
        assert not file.exists()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in held)


def test_an_engine_that_could_not_be_built_is_shut_down_without_another_error(tmp_path: Path):
    asyncio.run(EngineProcess(str(tmp_path / "log")).shutdown())
