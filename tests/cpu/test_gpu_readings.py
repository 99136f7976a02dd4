"""The plan of GPU readings (benchmarks/gpu_readings.py): its commands exist, end in time, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_step
import psutil
import pytest
from gpu_readings import READINGS, STEP, Reading, Readings, arguments, main

ROOT = Path(__file__).parents[2]
CHILD = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""

ON_INTERRUPT = """
import signal, subprocess, sys, time
def more(*_):
    print(subprocess.Popen(["sleep", "60"], start_new_session={new_session}).pid, flush=True)
    {then}
signal.signal(signal.SIGINT, more)
print("ready", flush=True)
while True:
    time.sleep(60)
"""

PLAN = """
import sys, gpu_readings
gpu_readings.TO_END_S = 1.0
hang = gpu_readings.Reading(1, sys.argv.pop(), 60, alone=False)
gpu_readings.READINGS = {"hang": hang, "next": hang}
sys.exit(gpu_readings.main())
"""


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_names_files_and_arguments_that_exist(name: str):
    words = READINGS[name].command.format(models="models", out="out").split()
    files = [word for word in words if word.endswith(".py")]
    assert files or "tests/gpu" in words
    assert all((ROOT / file).is_file() for file in files)
    if words[0] == STEP:
        given = gpu_step.arguments(words[1:])
        assert given.gpus * (1 if given.colocate or given.update_only else 2) == READINGS[name].gpus
        assert READINGS[name].shape == (given.shape if given.model else None)


def run(tmp_path: Path, seconds: float, readings: dict[str, Reading], lanes: int) -> list[str]:
    Readings(tmp_path, tmp_path, time.monotonic() + seconds).run(readings, range(lanes))
    return sorted((tmp_path / "summary.txt").read_text().splitlines())


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_does_not_end_in_time_is_stopped_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu_readings.TO_END_S", 1.0)
    (tmp_path / "hang.py").write_text(CHILD)
    (line,) = run(tmp_path, 60, {"hang": Reading(1, f"{tmp_path}/hang.py", 2)}, 1)
    assert line.startswith("hang: stopped after 2 s")
    assert ended(int((tmp_path / "hang.log").read_text().splitlines()[1]))


@pytest.mark.parametrize(("new_session", "then"), [(True, "pass"), (False, "sys.exit()")], ids=["stays", "goes"])
def test_what_starts_while_a_reading_is_ended_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_session: bool, then: str
):
    monkeypatch.setattr("gpu_readings.TO_END_S", 1.0)
    (tmp_path / "more.py").write_text(ON_INTERRUPT.format(new_session=new_session, then=then))
    run(tmp_path, 60, {"more": Reading(1, f"{tmp_path}/more.py", 2)}, 1)
    _, ready, pid = (tmp_path / "more.log").read_text().splitlines()
    assert ready == "ready"
    assert ended(int(pid))


def test_who_interrupts_before_all_lanes_have_begun_does_not_wait_for_the_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "hang.log"

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            super().submit(*args, **kwargs)
            while not log.exists() or len(log.read_text().splitlines()) < 2:
                time.sleep(0.05)
            raise KeyboardInterrupt

    monkeypatch.setattr("gpu_readings.ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr("gpu_readings.TO_END_S", 1.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (tmp_path / "hang.py").write_text(CHILD)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 60, {"hang": Reading(1, f"{tmp_path}/hang.py", 20)}, 2)
    assert (tmp_path / "summary.txt").read_text().startswith("hang: exit code -9")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_the_readings_has_nothing_left_running(tmp_path: Path, number: signal.Signals):
    (tmp_path / "hang.py").write_text(CHILD)
    options = ["--gpus=1", f"--out={tmp_path}", f"{tmp_path}/hang.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"}
    readings = subprocess.Popen([sys.executable, "-c", PLAN, *options], env=environment)
    log, lines = tmp_path / "hang.log", []
    while len(lines) < 2:
        assert readings.poll() is None
        time.sleep(0.1)
        lines = log.read_text().splitlines() if log.exists() else []
    readings.send_signal(number)
    assert readings.wait(timeout=30) == 130
    assert ended(int(lines[1]))
    hang, following = (tmp_path / "summary.txt").read_text().splitlines()
    assert hang.startswith("hang: exit code -9")
    assert following == "next: not begun, 0 s were left"


def test_a_model_that_cannot_be_made_stops_no_other_reading(tmp_path: Path):
    (tmp_path / "tiny").write_text("where the model's folder should be")
    readings = {"with": Reading(1, "-c pass {models}/tiny", 5), "without": Reading(1, "-c pass", 5)}
    lines = run(tmp_path, 60, readings, 1)
    assert lines[0].startswith("with: not begun, its model could not be made: FileExistsError")
    assert lines[1].startswith("without: exit code 0")


def test_readings_of_one_gpu_run_side_by_side_and_see_their_own(tmp_path: Path):
    (tmp_path / "see.py").write_text("import os, time\ntime.sleep(1)\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    readings = {name: Reading(1, f"{tmp_path}/see.py", 5) for name in ("a", "b")}
    lines = run(tmp_path, 60, readings, 2)
    assert [line.split(",")[0] for line in lines] == ["a: exit code 0", "b: exit code 0"]
    assert {(tmp_path / f"{name}.log").read_text().splitlines()[-1] for name in readings} == {"0", "1"}


def test_what_cannot_end_any_more_is_not_begun(tmp_path: Path):
    """A third of the limit is what it takes."""
    (line,) = run(tmp_path, 15, {"late": Reading(1, "-c pass", 60)}, 1)
    assert line == "late: not begun, 15 s were left"


def test_what_needs_more_gpus_is_in_the_summary_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu_readings.READINGS", {"two": Reading(2, "-c pass", 5), "one": Reading(1, "-c pass", 5)})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["gpu_readings.py", "--gpus=1", f"--out={tmp_path}"])
    assert main() == 0
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["two: needs 2 GPUs", "one: exit code 0"]


def test_a_name_that_is_none_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        arguments(["pp3"])
    assert "there is no reading pp3; there are pp2" in capsys.readouterr().err
