"""The process of an engine's core imports vLLM instead of its parent's program, and does not outlive its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest

from skyrl_train.engines.vllm.core_start import quick_core_start

# It waits for the child's watch, a second thread: until then the child does not know whose child it is.
PROGRAM = """
import os
with open("ran", "a") as file:
    file.write(__name__ + " ")
if __name__ == "__main__":
    import multiprocessing, signal, time
    import psutil
    from skyrl_train.engines.vllm.core_start import quick_core_start
    with quick_core_start():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
    until = time.monotonic() + 20
    while psutil.Process(child.pid).num_threads() < 2 and time.monotonic() < until:
        time.sleep(0.05)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_core_skips_the_program_that_started_it_and_ends_with_it(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        try:
            assert parent.wait(30) == -signal.SIGKILL
            _, alive = psutil.wait_procs([core], timeout=20)
            assert not alive, "the core lives on"
        finally:
            parent.kill()
            if core.is_running():
                core.kill()
    assert (tmp_path / "ran").read_text().split() == ["__main__"]


def test_the_main_module_is_back_whatever_happens():
    main = sys.modules["__main__"]
    with pytest.raises(ArithmeticError), quick_core_start():
        assert spawn.get_preparation_data("a child")["init_main_from_name"] == "skyrl_train.engines.vllm.core_start"
        raise ArithmeticError
    assert sys.modules["__main__"] is main
