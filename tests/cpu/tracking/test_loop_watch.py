"""A blocked event loop, in a process of its own: it gets signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, logging, sys, time
from skyrl_train.tracking import loop_watch
loop_watch.TICK_S, loop_watch.BLOCKED_S, loop_watch.WARNING_S = 0.05, 0.2, 0.2
logging.basicConfig(level=logging.INFO)

async def rollout():
    print("begins", flush=True)
    time.sleep(60)

async def main():
    with loop_watch.LoopWatch(float(sys.argv[1]), lambda number: print("signal", number, flush=True)):
        await asyncio.gather(*(rollout() for _ in range(9)))

loop_watch.run(main())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def test_a_call_that_blocks_the_loop_ends_at_the_deadline_and_is_named(program: Path):
    started = time.monotonic()
    ended = subprocess.run([sys.executable, program, "1"], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and time.monotonic() - started < 40
    line = PROGRAM[: PROGRAM.index("    time.sleep")].count("\n") + 1
    assert re.search(
        rf"RuntimeError: the run's event loop has been blocked for \d+ s by .*program.py:{line}", ended.stderr
    )
    assert "WARNING" in ended.stderr and "as long as trainer.timeout_s allows. Code that runs in" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_call_that_blocks_the_loop(program: Path, number: signal.Signals):
    with subprocess.Popen(
        [sys.executable, program, "50"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stderr is not None and run.stdout.readline() == "begins\n"
        for line in run.stderr:
            if "event loop has been blocked" in line:
                break
        run.send_signal(number)
        time.sleep(0.3)
        assert run.poll() is None, "the first one asks for the end of the step"
        run.send_signal(number)
        errors = run.communicate(timeout=40)[1]
    assert errors.rstrip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "loop_watch.Terminated")
