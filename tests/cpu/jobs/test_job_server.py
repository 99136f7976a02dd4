"""A forked driver is what `python -m MODULE` starts: folder, variables, process group, end and exit code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.job_server import SERVER, Forked
from tests.support.jobs import start_command

pytestmark = pytest.mark.slow
PROGRAM = """\
import atexit, os, sys, time

atexit.register(lambda: print("the end", flush=True))
if __name__ == "__main__":
    print(sys.argv[1:], os.getcwd(), os.environ["OWN"], os.getpgid(0) == os.getpid(), flush=True)
    match sys.argv[1]:
        case "exits":
            sys.exit(3)
        case "fails":
            raise ValueError("of this program")
        case "waits":
            time.sleep(300)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def start(folder: Path, how: str) -> tuple[Forked, Path]:
    variables = {**os.environ, "PYTHONPATH": str(folder), "OWN": "variable"}
    output = folder / "out"
    return SERVER.start("program", [how], folder, variables, output), output


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("exits", 3), ("fails", 1)])
def test_a_driver_runs_as_the_main_module_and_ends_with_its_code(folder: Path, how: str, code: int):
    driver, output = start(folder, how)
    assert driver.wait(60) == code
    first, *rest = output.read_text().splitlines()
    assert first == f"['{how}'] {folder} variable True"
    assert rest[-1] == "the end" and ("ValueError: of this program" in rest) == (how == "fails")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_ended_by_a_signal_says_so_and_is_gone(folder: Path, number: signal.Signals):
    driver, output = start(folder, "waits")
    while not output.read_text():
        assert driver.poll() is None
    os.killpg(driver.pid, number)
    assert driver.wait(60) == -number
    assert not psutil.pid_exists(driver.pid)


@pytest.mark.parametrize(("variable", "is_forked"), [("OWN", True), ("RAY_OWN", False), ("HF_HOME", False)])
def test_a_job_with_variables_that_its_imports_read_gets_a_new_process(folder: Path, variable: str, is_forked: bool):
    environment = {"OWN": "variable", variable: "variable"}
    job = start_command([sys.executable, "-m", "program", "exits"], folder, "own", "mark", environment)
    assert isinstance(job.process, Forked) == is_forked
    assert job.wait(60) == 3 and "the end" in job.output
