"""What hangs in users' code holds nothing back: neither a cancelled task nor a call in a thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_train import cancellation
from skyrl_train.cancellation import DaemonThreads, cancel, has_result, in_thread

PROGRAM = """
import asyncio, time
from skyrl_train import cancellation
from skyrl_train.tracking import loop_watch
cancellation.CANCEL_S = cancellation.THREADS_S = 0.2

async def swallows():
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass

async def main():
    hanging = [asyncio.create_task(asyncio.to_thread(time.sleep, 100)) for _ in range(40)]
    stubborn = asyncio.create_task(swallows())
    await asyncio.sleep(0.1)
    assert [await cancellation.in_thread(abs, -n) for n in range(3)] == [0, 1, 2], "though all threads are held"
    raise ValueError("no disk")

loop_watch.run(main())
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "CANCEL_S", 0.2)


def test_a_failed_run_ends_with_its_error_whatever_hangs(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "ValueError: no disk" in ended.stderr
    assert "1 cancelled tasks do not end" in ended.stderr and "swallows" in ended.stderr


class Task:
    """Notes when it is cancelled, and takes its time to clean up."""

    def __init__(self, cleanup_s: float, times: int = 1) -> None:
        self.cleanup_s, self.times, self.num_cancelled, self.has_cleaned_up = cleanup_s, times, 0, False

    async def __call__(self) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            while self.num_cancelled < self.times:
                self.num_cancelled += 1
                try:
                    await asyncio.sleep(self.cleanup_s)
                    self.has_cleaned_up = True
                    break
                except asyncio.CancelledError:
                    pass


async def started(*tasks: Task) -> list[asyncio.Task[None]]:
    running = [asyncio.create_task(task()) for task in tasks]
    await asyncio.sleep(0)
    return running


def test_a_cancelled_task_may_clean_up():
    async def main() -> None:
        running = await started(tidy := Task(0.05))
        await cancel(running)
        assert tidy.has_cleaned_up and running[0].cancelled()

    asyncio.run(main())


def test_one_that_hangs_in_its_cleanup_is_cancelled_again_and_then_left_alone(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        running = await started(once := Task(100), stubborn := Task(100, times=2))
        began = time.monotonic()
        await cancel(running)
        assert 0.3 < time.monotonic() - began < 5
        assert once.num_cancelled == 1 and running[0].done() and not has_result(running[0])
        assert stubborn.num_cancelled == 2 and not running[1].done()
        running[1].cancel()
        await asyncio.wait(running)

    asyncio.run(main())
    assert "1 cancelled tasks do not end" in caplog.text


def test_tasks_that_wait_for_others_are_cancelled_without_an_end_to_the_cleanup_of_these():
    async def nested(tasks: list[asyncio.Task[None]]) -> None:
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            await cancel(tasks)
            raise

    async def main() -> None:
        inner = await started(tidy := Task(0.1))
        outer = asyncio.create_task(nested(inner))
        await asyncio.sleep(0)
        outer.cancel()
        await asyncio.sleep(0.02)
        await cancel([outer])
        assert tidy.has_cleaned_up and tidy.num_cancelled == 1 and outer.cancelled()

    asyncio.run(main())


def test_threads_end_when_their_calls_have_and_serve_again_later():
    threads, before = DaemonThreads(), threading.active_count()
    for _ in range(2):
        assert [threads.submit(divmod, n, 2).result(10) for n in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        with pytest.raises(ZeroDivisionError):
            threads.submit(divmod, 1, 0).result(10)
        threads.shutdown()
        assert threading.active_count() == before


def test_a_call_that_hangs_while_threads_end_takes_no_later_call():
    threads, hangs = DaemonThreads(), threading.Event()
    stuck = threads.submit(hangs.wait, 60)
    threads.shutdown()
    assert [threads.submit(divmod, n, 2).result(10) for n in range(2)] == [(0, 0), (0, 1)]
    hangs.set()
    assert stuck.result(10)
    threads.shutdown()


def test_calls_of_the_package_have_threads_of_their_own():
    async def main() -> int:
        return await in_thread(int, "7")

    assert asyncio.run(main()) == 7
