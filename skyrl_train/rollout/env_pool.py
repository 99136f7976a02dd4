"""Threads for environments, so that a slow or hanging one never blocks the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORKER_NAME = "skyrl-env"
"""Name of the threads."""


class CallTimeout(TimeoutError):
    """A call of an environment ran for too long; its thread is abandoned."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class _Worker(threading.Thread):
    """Runs calls from the queue until it receives None or is abandoned."""

    def __init__(self, calls: queue.SimpleQueue[_Call | None], report: Callable[[_Call], None]) -> None:
        super().__init__(daemon=True, name=WORKER_NAME)
        self._calls = calls
        self._report = report
        self.current: _Call | None = None
        self.started_s = 0.0
        self.abandoned = False

    def run(self) -> None:
        while not self.abandoned and (call := self._calls.get()) is not None:
            if call.future.cancelled():
                continue
            # In this order: a reader that sees the new call also sees its start time.
            self.started_s = time.monotonic()
            self.current = call
            try:
                call.result = call.function()
            except BaseException as error:  # raised where the call is awaited
                call.error = error
            self.current = None
            self._report(call)
            del call  # it may hold an environment and long samples


class EnvPool:
    """Runs calls on at most `max_workers` threads at once; a call that runs longer than `timeout_s` fails.

    Not a ThreadPoolExecutor, because (1) its threads are joined when Python exits, so a hanging environment would keep
    the driver alive forever; (2) a timeout around its futures includes the time in the queue, where most of a large
    batch waits; (3) it wakes the event loop once per call: here results come in bunches.
    Bound to the event loop that uses it; another loop may use it once nothing is running.
    """

    def __init__(self, max_workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._max_workers = max_workers
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._finished: deque[_Call] = deque()
        self._workers: list[_Worker] = []
        self._pending: set[_Call] = set()
        self._delivery_scheduled = False
        self._watch: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call; its future fails with CallTimeout if the call runs for longer than `timeout_s`.

        Cancelling the future removes the call from the queue; a running call continues, and its result is dropped.
        """
        assert not self._closed, "the environment pool is closed"
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        call = _Call(function, loop.create_future())
        self._pending.add(call)
        self._calls.put(call)
        if len(self._workers) < min(self._max_workers, len(self._pending)):
            self._start_worker()
        if self._watch is None:
            self._schedule_watch()
        return call.future

    def close(self, timeout_s: float) -> None:
        """Let queued calls finish and end the threads; abandon them after `timeout_s`."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for _ in self._workers:
            self._calls.put(None)
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and not self._loop.is_closed():
            assert not self._pending, "an environment pool serves one event loop at a time"
        self._loop, self._watch = loop, None
        self._pending.clear()
        self._finished.clear()
        self._delivery_scheduled = False

    def _start_worker(self) -> None:
        worker = _Worker(self._calls, self._report)
        self._workers.append(worker)
        worker.start()

    def _report(self, call: _Call) -> None:
        """On a worker's thread: queue the result, and wake the loop unless a wake-up is pending.

        A result appended while the flag is set is always delivered: `_deliver` clears the flag before it reads.
        """
        self._finished.append(call)
        loop = call.future.get_loop()
        if self._delivery_scheduled or loop is not self._loop:
            return
        self._delivery_scheduled = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            if not loop.is_closed():
                raise  # nothing awaits results of a closed loop

    def _deliver(self) -> None:
        self._delivery_scheduled = False
        while self._finished:
            call = self._finished.popleft()
            self._pending.discard(call)
            if call.future.done() or call.future.get_loop() is not self._loop:
                continue
            if call.error is None:
                call.future.set_result(call.result)
            else:
                call.future.set_exception(call.error)

    def _schedule_watch(self) -> None:
        assert self._loop is not None
        self._watch = self._loop.call_later(min(1.0, self.timeout_s / 4), self._fail_overdue)

    def _fail_overdue(self) -> None:
        """Abandon threads whose call timed out, and start others for the calls that wait."""
        overdue_s = time.monotonic() - self.timeout_s
        for worker in list(self._workers):
            call = worker.current
            if call is None or worker.started_s > overdue_s:
                continue
            worker.abandoned = True
            self._workers.remove(worker)
            self._pending.discard(call)
            if not call.future.done():
                call.future.set_exception(CallTimeout(f"still running after {self.timeout_s:g} s"))
        self._pending = {call for call in self._pending if not call.future.cancelled()}
        while len(self._workers) < min(self._max_workers, len(self._pending)):
            self._start_worker()
        self._watch = None
        if self._pending:
            self._schedule_watch()
