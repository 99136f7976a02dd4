"""The environment `math_verify`: one turn, whose answer is compared with the ground truth as mathematics."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

log = logging.getLogger(__name__)

BOX = "\\boxed"
SCIENTIFIC = re.compile(r"\s*(?P<mantissa>[+-]?(\d+\.?\d*|\.\d+))[eE](?P<exponent>[+-]?\d+)\s*")
PERCENT = re.compile(r"(?<!\\)%")


SECONDS = 5.0
"""Processor time of one comparison, math-verify's own limit; beyond it an answer is wrong."""
ATTEMPTS = 3
"""Processes that are asked: one can end for lack of questions, or by a signal that was meant for all."""
SHOWN = 80
"""Characters of such a response in the log."""


class MathVerifyEnv(BaseTextEnv):
    """Reward 1 if the response's last answer (`\\boxed{...}` first, then LaTeX and numbers) equals the ground truth.

    `reward_spec.ground_truth` is LaTeX, with or without dollar signs, or a number: 0.5, 1/2 and \\frac{1}{2} are equal.
    """

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        """Raises: ValueError if math-verify is not installed or cannot read the ground truth."""
        super().__init__()
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math-verify is not installed. Run pip install 'skyrl_train[math]'")
        truth = str(extras["reward_spec"]["ground_truth"])
        literals = [truth.strip()] if SCIENTIFIC.fullmatch(truth) else []  # written as here
        self._truth = {"truth": list(_forms(truth)), "literals": literals}
        if not JUDGES.ask(**self._truth, readings=[])["has_answer"]:
            raise ValueError(f"reward_spec.ground_truth is {truth!r}: math-verify finds no answer in it")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        is_right = JUDGES.ask(**self._truth, readings=list(_readings(action)))["is_right"]
        return BaseTextEnvStepOutput(observations=[], reward=float(is_right), done=True, metadata={})


class Judges:
    """Processes of math_judge.py, started as they are needed, for calls on any number of threads."""

    def __init__(self, number: int) -> None:
        """Args: number: of processes, at most."""
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(number):
            self._idle.put(None)

    def ask(self, **question: list[str]) -> Mapping[str, bool]:
        """What `math_judge.compared` answers; nothing holds if that takes too long.

        Raises: RuntimeError if the process ends with an error, or by a signal again and again.
        """
        judge = self._idle.get()
        try:
            for _ in range(ATTEMPTS):
                if judge is None or judge.poll() is not None:
                    judge = _started()
                if line := _line_of(judge, json.dumps(question)):
                    answer: Mapping[str, bool] = json.loads(line)
                    return answer
                code, judge = judge.wait(), None
                if code == -signal.SIGPROF:
                    text = "".join(question["readings"])[-SHOWN:]
                    log.warning("comparing an answer took more than %g s, so it counts as wrong: %s", SECONDS, text)
                    return {"has_answer": False, "is_right": False}
                if code > 0:
                    break
            raise RuntimeError(f"math-verify failed (exit code {code}); its error is in the output of the run")
        except BaseException:  # its answer would be taken for that to the next question
            if judge is not None:
                judge.kill()
                judge.communicate()
            judge = None
            raise
        finally:
            self._idle.put(judge)


def _started() -> subprocess.Popen[str]:
    """In a session of its own, so that Ctrl-C does not end it before the run does; it ends with its input."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_judge.py")), str(SECONDS)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _line_of(judge: subprocess.Popen[str], question: str) -> str:
    """Its answer; "" if it has ended."""
    assert judge.stdin is not None and judge.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        judge.stdin.write(f"{question}\n")
        judge.stdin.flush()
    if not (line := judge.stdout.readline()):
        for stream in (judge.stdin, judge.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it has not read
                stream.close()
    return line


JUDGES = Judges(max(4, len(os.sched_getaffinity(0))))


def _forms(truth: str) -> Iterator[str]:
    """The ground truth as LaTeX that math-verify reads: it takes the e of 1e-05 for Euler's number, large numbers with
    and without an exponent for different ones, and in boxes a percentage with and without a backslash, too.
    """
    forms = [truth, PERCENT.sub(r"\\%", truth), truth.replace(r"\%", "%")]
    if number := SCIENTIFIC.fullmatch(truth):
        forms = [f"{Decimal(truth):f}", f"{number['mantissa']} \\times 10^{{{int(number['exponent'])}}}"]
    for form in dict.fromkeys(forms):
        yield form if "$" in form or BOX in form else f"${form}$"


def _readings(response: str) -> Iterator[str]:
    """The response and, because math-verify makes a set of boxes that are close together, its last box."""
    yield response
    if response.count(BOX) > 1:
        yield response[response.rindex(BOX) :]
