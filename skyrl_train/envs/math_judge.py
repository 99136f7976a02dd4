"""The program that compares answers for math_answers.py: one line of JSON in, one out, until its input ends.

A power tower in a response (9^{9^9}) keeps sympy in one call for hours, in which no other thread of its process runs
and no handler of a signal either. So this is a process of its own, which the system ends after the processor time of
its argument, or when nobody asks it. It imports nothing of skyrl_train: it starts in a second.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

IDLE_S = 30
"""Seconds without a line after which the process ends."""
MAX_BYTES = 4 * 2**30
"""Memory of the process."""


def parsed(text: str) -> list[Any]:
    """The answers in a text."""
    return parse(text, parsing_timeout=None)


parsed_truth = functools.lru_cache(maxsize=4096)(parsed)
"""A group's samples have the same ground truth."""


def compared(truth: list[str], literals: list[str], readings: list[str]) -> dict[str, bool]:
    """Whether the ground truth has an answer, and whether one of the readings of the response equals it.

    Args: truth: as LaTeX, in several forms; literals: further answers as they are written.
    """
    answers = [answer for form in truth for answer in parsed_truth(form)] + literals
    right = any(verify(answers, parsed(text), timeout_seconds=None) for text in readings)
    return {"has_answer": bool(answers), "is_right": right}


def answer_to(line: str) -> str:
    """Nothing holds of what needs too much memory or is nested too deep."""
    try:
        return json.dumps(compared(**json.loads(line)))
    except (MemoryError, RecursionError):
        return json.dumps({"has_answer": False, "is_right": False})


def main(seconds: float) -> None:
    """Args: seconds: of processor time for one line. Both timers end a process that has no handler for them."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no answer
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run that is asked to stop still finishes its step
    logging.disable(logging.CRITICAL)  # it would warn that its own timeouts, which need a handler, are off
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    parsed("$1$")  # reads the grammar
    signal.alarm(IDLE_S)
    for line in sys.stdin:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = answer_to(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(IDLE_S)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
