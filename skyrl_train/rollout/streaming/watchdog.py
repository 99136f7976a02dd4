"""Explanation of a stall: the cause in one sentence, and the stacks of the rollouts."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from skyrl_train.config import Config
from skyrl_train.rollout.contract import Requests
from skyrl_train.rollout.env_pool import WORKER_NAME

log = logging.getLogger(__name__)
SHOWN = 4


class NoProgress(RuntimeError):
    """No rollout, request or environment call ended for longer than a rollout's deadlines allow."""


def no_progress(
    quiet_s: float, requests: Requests, *, num_running: int, waits: str, failures: Sequence[str]
) -> NoProgress:
    """The error of a run in which the trainer waits for groups and rollouts stand still. Weight syncs and calls of
    ranks have their own deadlines.

    Args: quiet_s: seconds since anything last ended; requests: those that the engines have not answered; num_running:
        rollouts or groups that run; waits: what the step waits for, as a sentence; failures: of rollouts, since the
        last batch.
    """
    if requests:
        sent = f"the oldest was sent {requests.oldest_s:.0f} s ago"
        cause = f"the engines hold {len(requests)} requests and answer none; {sent}"
    elif num_running:
        cause = "no request is at the engines: environments, or the rollouts' own code, do not return"
    else:
        cause = "no group runs, and none may start. This is a bug in the source"
    failed = f" {len(failures)} rollouts failed since the last step: {'; '.join(failures[-SHOWN:])}."
    return NoProgress(
        f"no rollout, request or environment call ended for {quiet_s:g} s, longer than all turns of one may take: "
        f"{cause}. {waits}."
        f"{failed if failures else ''} The log has the stacks. If rollouts need more time, raise trainer.timeout_s"
    )


def warn_of_slow(quiet_s: float, names: Sequence[str]) -> None:
    """Warn that rollouts move and none ends. Args: quiet_s: since the last one ended; names: of their tasks."""
    log.warning(
        "no rollout has ended for %.0f s, though engines or environments answer. Do these end? %s",
        quiet_s,
        stacks(names[:SHOWN]),
    )


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
