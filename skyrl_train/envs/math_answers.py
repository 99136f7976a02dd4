"""The environment `math_verify`: one turn, whose answer is compared with the ground truth as mathematics."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

BOX = "\\boxed"
SCIENTIFIC = re.compile(r"\s*(?P<mantissa>[+-]?(\d+\.?\d*|\.\d+))[eE](?P<exponent>[+-]?\d+)\s*")
PERCENT = re.compile(r"(?<!\\)%")


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
        self._truth = [answer for form in _forms(truth) for answer in _parsed(form)]
        self._truth += [truth.strip()] if SCIENTIFIC.fullmatch(truth) else []  # written as here
        if not self._truth:
            raise ValueError(f"reward_spec.ground_truth is {truth!r}: math-verify finds no answer in it")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        from math_verify import verify

        # The time limits of math-verify are signals, which only a main thread can set; environment.step_timeout_s
        # limits each step instead.
        is_right = any(verify(self._truth, _parsed(text), timeout_seconds=None) for text in _readings(action))
        return BaseTextEnvStepOutput(observations=[], reward=float(is_right), done=True, metadata={})


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


def _parsed(text: str) -> list[Any]:
    """The answers in a text."""
    from math_verify import parse

    return parse(text, parsing_timeout=None)
