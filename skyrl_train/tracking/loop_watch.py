"""Notice that a run's event loop is blocked, for example by a rollout that waits without `await`: nothing else of the
run continues then, neither deadlines nor signals.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

from skyrl_train.cancellation import until_ended

log = logging.getLogger(__name__)
T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TICK_S = 1.0
BLOCKED_S = 5.0
"""Seconds after which a second signal ends the call that blocks the loop."""
WARNING_S = 30.0
"""Seconds after which the log has the stack of the call."""
REMEDY = (
    "Code that runs in the event loop must await what takes time: use an async client, or asyncio.to_thread(function)"
)


class Terminated(KeyboardInterrupt):
    """SIGTERM that no running event loop handles."""


class LoopBlocked(KeyboardInterrupt):
    """A call blocked the event loop for too long. asyncio ends the loop with a KeyboardInterrupt; after any other error
    the next rollout would block it again.
    """


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, without waiting for what does not end. Raises: RuntimeError for a loop that was blocked."""
    try:
        return asyncio.run(until_ended(main))
    except LoopBlocked as blocked:
        raise RuntimeError(str(blocked)) from blocked


class LoopWatch:
    """While entered, a thread watches the running event loop, and ends a call that blocks it beyond the deadline.

    It counts its own ticks, so a machine that sleeps, or a stopped process, is not a blocked loop. Only a call in the
    main thread can be ended; in another one it is logged.
    """

    def __init__(self, deadline_s: float, on_signal: Callable[[int], object] | None) -> None:
        """Args: on_signal: called in the loop with SIGINT or SIGTERM; None outside the main thread."""
        self._deadline_s, self._on_signal = deadline_s, on_signal
        self._missed_ticks = self._num_signals = 0
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> LoopWatch:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        if self._on_signal is not None:  # of asyncio's own handlers a blocked loop calls none
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _beat(self) -> None:
        self._missed_ticks = 0
        self._timer = self._loop.call_later(TICK_S, self._beat)

    @property
    def _blocked_s(self) -> float:
        return max(0.0, (self._missed_ticks - 1) * TICK_S)

    @property
    def _is_late(self) -> bool:
        return self._blocked_s >= self._deadline_s

    def _watch(self) -> None:
        was_logged = False
        while not self._ended.wait(TICK_S):
            self._missed_ticks += 1
            if self._blocked_s < min(WARNING_S, self._deadline_s):
                was_logged = False
            elif not was_logged:
                was_logged = True
                log.warning("%s. %s\n%s", self._problem(), REMEDY, "".join(traceback.format_stack(self._frame())))
            if self._is_late and self._on_signal is not None:
                signal.pthread_kill(self._thread_id, signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_late:
            problem = self._problem()
            self._missed_ticks = 0
            raise LoopBlocked(f"{problem}, as long as trainer.timeout_s allows. {REMEDY}")
        self._num_signals += 1
        if self._num_signals > 1 and self._blocked_s >= BLOCKED_S:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        assert self._on_signal is not None, "or this is not its handler"
        self._loop.call_soon_threadsafe(self._on_signal, number)

    def _frame(self) -> FrameType | None:
        """Innermost call in the loop's thread that is not of this file."""
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame

    def _problem(self) -> str:
        frame = self._frame()
        where = "" if frame is None else f" by {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        return f"the run's event loop has been blocked for {self._blocked_s:.0f} s{where}"
