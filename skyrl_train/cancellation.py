"""Cancelled tasks, and threads, that run users' code, with limits on how long they are waited for."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
CANCEL_S = 15.0
"""Seconds that a cancelled task gets to clean up. Then it is cancelled again, and gets as many once more."""
THREADS_S = 5.0
"""Seconds that threads get to end."""
MAX_THREADS = 32


async def until_ended(main: Coroutine[Any, Any, T]) -> T:
    """`await main`, for `asyncio.run`, which would wait for all other tasks and threads of the loop to end: one that
    hangs would keep a failed run alive, with its error unprinted.
    """
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        return await main
    finally:
        stuck, _ = await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        for task in stuck:
            asyncio.tasks._unregister_task(task)  # type: ignore[attr-defined]
        OWN_THREADS.shutdown()


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; those that hang in their cleanup are abandoned.

    If the calling task is cancelled meanwhile, the wait continues, and CancelledError is raised at its end.
    """
    _, was_cancelled = await _cancel(tasks)
    if was_cancelled:
        raise asyncio.CancelledError


async def _cancel(tasks: Collection[asyncio.Task[Any] | None]) -> tuple[set[asyncio.Task[Any]], bool]:
    """Returns: tasks that have not ended, and whether this call was cancelled."""
    all_tasks, was_cancelled = {task for task in tasks if task is not None}, False
    running = all_tasks
    for _ in range(2):
        for task in running:
            task.cancel()
        deadline_s = time.monotonic() + CANCEL_S
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                _, running = await asyncio.wait(running, timeout=left_s)
            except asyncio.CancelledError:
                was_cancelled, running = True, {task for task in running if not task.done()}
    if running:
        names = sorted({f"{task.get_name()} ({task.get_coro()!r:.200})" for task in running})
        log.error("%d cancelled tasks do not end: %s", len(running), "; ".join(names[:4]))
    for task in all_tasks:
        has_result(task)  # else asyncio warns of errors that were never retrieved
    return running, was_cancelled


def has_result(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended without an error."""
    return task.done() and not task.cancelled() and task.exception() is None


_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
"""Calls with their futures; None ends a thread."""


class DaemonThreads(ThreadPoolExecutor):
    """At most MAX_THREADS threads for which Python's exit does not wait."""

    def __init__(self) -> None:
        super().__init__()  # asyncio accepts no other executor; that one's threads never start
        self._calls: _Calls = queue.SimpleQueue()
        self._lock, self._workers, self._num_calls = threading.Lock(), set[threading.Thread](), 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        with self._lock:
            self._calls.put((future, partial(fn, *args, **kwargs)))
            self._num_calls += 1
            if len(self._workers) < min(self._num_calls, MAX_THREADS):
                worker = threading.Thread(target=self._work, args=(self._calls,), name="skyrl-call", daemon=True)
                self._workers.add(worker)
                worker.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the queued calls, and abandon those that have not ended after THREADS_S. Calls that
        come later get new threads.
        """
        with self._lock:
            workers, calls = list(self._workers), self._calls
            self._workers, self._calls, self._num_calls = set(), queue.SimpleQueue(), 0
        for _ in workers:
            calls.put(None)
        deadline_s = time.monotonic() + THREADS_S
        for worker in workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # raised where the call is awaited
                    future.set_exception(error)
            del call, future, function
            with self._lock:
                if calls is self._calls:
                    self._num_calls -= 1


OWN_THREADS = DaemonThreads()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Like `asyncio.to_thread`, for calls of this package: those of users may hold all threads of the loop."""
    return await asyncio.get_running_loop().run_in_executor(OWN_THREADS, partial(function, *args))
