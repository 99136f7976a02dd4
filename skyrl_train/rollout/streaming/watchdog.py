"""Explanation of a stall: the cause in one sentence, and the stacks of the rollouts."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from skyrl_train.config import Config
from skyrl_train.rollout.env_pool import WORKER_NAME

SHOWN = 4


class NoProgress(RuntimeError):
    """No rollout ended for longer than its deadlines allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """State of a run in which the trainer waits for groups and no rollout ends.

    Weight syncs and calls of ranks have deadlines of their own.
    """

    num_running: int
    num_ready: int
    num_requests: int
    """Requests that the engines have not answered."""
    oldest_request_s: float
    step: int
    """The step that waits, from 1."""
    awaited: Sequence[str]
    """The groups for which it waits, oldest first, and how far they are."""
    failures: Sequence[str] = ()
    """Rollouts that failed since the last batch."""

    def error(self, quiet_s: float) -> NoProgress:
        """The error of the stall. Args: quiet_s: seconds since a rollout last ended."""
        more = f" and {len(self.awaited) - SHOWN} more" if len(self.awaited) > SHOWN else ""
        failed = f" {len(self.failures)} rollouts failed since the last step: {'; '.join(self.failures[-SHOWN:])}."
        return NoProgress(
            f"no rollout ended for {quiet_s:g} s, longer than all turns of one may take: {self.cause()}. Step "
            f"{self.step} waits for {', '.join(self.awaited[:SHOWN])}{more}; {self.num_running} groups run and "
            f"{self.num_ready} are ready.{failed if self.failures else ''} The log has the stacks. If rollouts "
            "need more time, raise trainer.timeout_s"
        )

    def cause(self) -> str:
        """Which part waits for what, as a clause."""
        if self.num_requests:
            return (
                f"the engines hold {self.num_requests} requests and answer none; the oldest was sent "
                f"{self.oldest_request_s:.0f} s ago"
            )
        if self.num_running:
            return "no request is at the engines: environments, or the rollouts' own code, do not return"
        return "no group runs, and none may start. This is a bug in the source"


def deadline_s(config: Config, num_attempts: int) -> float:
    """Seconds in which a rollout ends, or one of its calls fails at its own deadline."""
    turn_s = config.trainer.timeout_s + config.environment.step_timeout_s
    return num_attempts * config.generator.max_turns * turn_s + config.generator.weight_sync_timeout_s


def stacks(names: Iterable[str]) -> str:
    """Stacks of the tasks of these names and of all environment threads, innermost call last."""
    wanted = set(names)
    texts = [
        f"rollout of {task.get_name()}:\n{_lines(_frames(task.get_coro()))}"
        for task in asyncio.all_tasks()
        if task.get_name() in wanted
    ]
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == WORKER_NAME and thread.ident in frames:
            lines = "".join(traceback.format_stack(frames[thread.ident]))
            texts.append(f"environment thread {thread.ident}:\n{lines}")
    return "\n".join(texts)


def _frames(awaited: Any) -> list[FrameType]:
    """Frames of a suspended coroutine and of those that it awaits; `Task.get_stack` gives the first alone."""
    frames = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        frames += [frame] if frame is not None else []
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames


def _lines(frames: Sequence[FrameType]) -> str:
    summaries = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in frames), lookup_lines=True)
    return "".join(summaries.format())
