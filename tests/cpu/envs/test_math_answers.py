"""Answers compared as mathematics, on threads as in the environment pool."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyrl_train.envs  # noqa: F401 (registers the built-in environments)
from skyrl_train.envs import math_answers
from skyrl_train.envs.math_answers import Judges
from skyrl_train.envs.registry import make_env, row_problem

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed (the extra `math`)"
)


@pytest.fixture(autouse=True)
def own_judges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that end with the test."""
    monkeypatch.setattr(math_answers, "JUDGES", judges := Judges(2))
    yield
    for judge in filter(None, judges._idle.queue):
        judge.communicate(timeout=60)


def reward(truth: object, response: str) -> float:
    return make_env("math_verify", {}, {"reward_spec": {"ground_truth": truth}}).step(response)["reward"]


ANSWERS: list[tuple[object, str, float]] = [
    ("42", "So the answer is \\boxed{42}.", 1.0),
    ("42", "So the answer is \\boxed{41}, not 42.", 0.0),
    ("42", "The answer is 42", 1.0),
    ("\\frac{1}{2}", "That is $\\boxed{0.5}$.", 1.0),
    ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}", 1.0),
    ("$\\sqrt{8}$", "\\boxed{2\\sqrt{2}}", 1.0),
    ("(1,2)", "\\boxed{(1, 2)}", 1.0),
    ("(1,2)", "\\boxed{(2, 1)}", 0.0),
    ("1,080", "\\boxed{1080}", 1.0),
    ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
    ("3", "I get \\boxed{2}. Wait, I made a mistake. The total is \\boxed{3}.", 1.0),
    ("2", "I get \\boxed{2}. Wait, I made a mistake. The total is \\boxed{3}.", 0.0),
    ("3", "$\\boxed{2}$ or rather $x = \\boxed{3}$", 1.0),
    ("\\{1, 2\\}", "\\boxed{1} and \\boxed{2}", 1.0),
    (0.00001, "\\boxed{0.00001}", 1.0),
    (0.00001, "\\boxed{10^{-5}}", 1.0),
    (1e16, "\\boxed{10000000000000000}", 1.0),
    (6.02e23, "\\boxed{6.02 \\times 10^{23}}", 1.0),
    ("1e3", "\\boxed{1000}", 1.0),
    ("1e3", "\\boxed{3}", 0.0),
    ("1e3", "\\boxed{1e3}", 1.0),
    (0.00001, "\\boxed{1e-05}", 1.0),
    ("5\\%", "\\boxed{5%}", 1.0),
    ("5%", "\\boxed{5\\%}", 1.0),
    ("5%", "\\boxed{5%}", 1.0),
    ("5%", "It is 5%", 1.0),
    ("5\\%", "\\boxed{5\\%}", 1.0),
    ("5%", "\\boxed{6\\%}", 0.0),
    ("7", "I do not know.", 0.0),
    ("7", "", 0.0),
]


@needs_math_verify
def test_answers_are_compared_as_mathematics_on_threads():
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda case: reward(case[0], case[1]), ANSWERS))
    assert got == [expected for *_, expected in ANSWERS]


@needs_math_verify
def test_a_ground_truth_without_an_answer_is_found_before_a_run():
    problem = row_problem("math_verify", {}, {"reward_spec": {"ground_truth": ""}})
    assert problem is not None and "math-verify finds no answer in it" in problem


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = row_problem("math_verify", {}, {"reward_spec": {"ground_truth": "1"}})
    assert problem == "ValueError: math-verify is not installed. Run pip install 'skyrl_train[math]'"


@needs_math_verify
@pytest.mark.parametrize("answer", ["9^{9^{9}}", "2^{10^{9}}", "\\binom{1000000}{500000}"])
def test_an_answer_that_takes_too_long_is_wrong_and_stops_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str
):
    """It runs within one call of C: no thread and no handler of a signal could run in its process."""
    monkeypatch.setattr(math_answers, "SECONDS", 0.5)
    with ThreadPoolExecutor(2) as threads:
        slow, right = threads.submit(reward, "42", f"\\boxed{{{answer}}}"), threads.submit(reward, "42", "\\boxed{42}")
        assert right.result(60) == 1 and slow.result(60) == 0
    assert "took more than 0.5 s, so it counts as wrong: \\boxed{" in caplog.text
    assert [reward("42", "\\boxed{42}") for _ in range(3)] == [1.0] * 3


@needs_math_verify
@pytest.mark.parametrize("ended_by", [signal.SIGALRM, signal.SIGKILL])
def test_a_process_that_has_ended_while_nobody_asked_is_replaced(ended_by: signal.Signals):
    assert reward("42", "\\boxed{42}") == 1
    idle = math_answers.JUDGES._idle.queue[-1]
    assert idle is not None and idle.poll() is None
    os.kill(idle.pid, ended_by)
    assert reward("42", "\\boxed{42}") == 1 and math_answers.JUDGES._idle.queue[-1] is not idle


@needs_math_verify
def test_after_an_interrupt_no_answer_is_taken_for_that_to_another_question(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:

        def interrupted(judge: Any, question: str) -> str:
            judge.stdin.write(f"{question}\n")
            judge.stdin.flush()
            raise KeyboardInterrupt

        patch.setattr(math_answers, "_line_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            math_answers.JUDGES.ask(truth=["$1$"], literals=[], readings=[])
    answers = [reward("42", f"\\boxed{{{answer}}}") for answer in (1, 42, 2, 42)]
    assert answers == [0.0, 1.0, 0.0, 1.0]


@needs_math_verify
def test_a_comparison_that_fails_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"math-verify failed \(exit code 1\)"):
        reward("42", "\\boxed{42}")
