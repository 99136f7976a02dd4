"""The process of an engine's core imports vLLM instead of its parent's program, and does not outlive its parent."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest

from skyrl_train.engines.vllm.core_start import quick_core_start


def write_small_vllm(folder: Path) -> None:
    """A package that a process of this folder imports in place of vLLM, which takes 5 s of CPU time each time."""
    for module in ("__init__.py", "v1/engine/core.py", "v1/worker/gpu_worker.py"):
        (file := folder / "vllm" / module).parent.mkdir(parents=True, exist_ok=True)
        file.touch()


# It waits for the child's watch, a second thread: until then the child does not know whose child it is.
PROGRAM = """
import os
with open("ran", "a") as file:
    file.write(__name__ + " ")
if __name__ == "__main__":
    import multiprocessing, signal, sys, time
    import psutil
    from skyrl_train.engines.vllm.core_start import prepare_core, quick_core_start
    if sys.argv[1] == "waits":  # and learns who its parent is with its program
        prepare_core()
    with quick_core_start():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
    until = time.monotonic() + (0 if sys.argv[1] == "waits" else 20)
    while psutil.Process(child.pid).num_threads() < 2 and time.monotonic() < until:
        time.sleep(0.05)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["new", "waits"])
def test_a_core_skips_the_program_that_started_it_and_ends_with_it(tmp_path: Path, kind: str):
    write_small_vllm(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "program.py", kind], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as parent:
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


WAITING = """
import multiprocessing, os, sys, time
import psutil
from skyrl_train.engines.vllm import core_start
core_start.prepare_core()
waiting = core_start._waiting[0].pid
sys.path.append("added since")
os.environ |= {"SINCE": "set later", **eval(sys.argv[1])}
code = "import os, sys; print(os.environ['SINCE'], 'added since' in sys.path, flush=True); sys.exit(7)"
with core_start.quick_core_start():
    children = [multiprocessing.get_context("spawn").Process(target=exec, args=(code,)) for _ in range(2)]
    for child in children:
        child.start()
print([child.pid == waiting for child in children], flush=True)
for child in children:
    child.join(60)
until = time.monotonic() + 60
while psutil.pid_exists(waiting) and time.monotonic() < until:
    time.sleep(0.05)
print([child.exitcode for child in children], psutil.pid_exists(waiting), flush=True)
"""


@pytest.mark.parametrize(
    "since, waited",
    [
        pytest.param({}, [True, False], id="the first process"),
        pytest.param({"LD_PRELOAD": ""}, [False, False], id="not with a variable that comes too late"),
    ],
)
def test_a_core_that_waits_becomes_a_process_that_is_spawned(tmp_path: Path, since: dict[str, str], waited: list[bool]):
    if since:  # the other one imports vLLM's own modules
        write_small_vllm(tmp_path)
    (tmp_path / "program.py").write_text(WAITING)
    command = [sys.executable, "program.py", repr(since)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert lines.count("set later True") == 2, done.stderr
    assert str(waited) in lines
    assert lines[-1] == "[7, 7] False", "exit codes, and no process is left"
    assert "Warning" not in done.stderr


def test_a_core_that_waits_ends_with_its_parent(tmp_path: Path):
    write_small_vllm(tmp_path)
    program = "from skyrl_train.engines.vllm import core_start as it\nit.prepare_core()\nprint(it._waiting[0].pid)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
        core = psutil.Process(int(done.stdout))
        _, alive = psutil.wait_procs([core], timeout=60)
        assert not alive
