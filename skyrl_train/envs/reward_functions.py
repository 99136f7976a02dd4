"""The environment `reward_fn`: one turn, scored by the functions of `environment.reward_fn` in TRL's shape."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.imports import imported

KEY = "environment.reward_fn"
NOT_COLUMNS = ("prompt", "max_turns")


class RewardFunctionEnv(BaseTextEnv):
    """Calls each function with lists of one element: `prompts`, `completions`, `completion_ids` and every column.

    Prompt and completion are text if the row's prompt was text, else lists of chat messages. A function without
    `**kwargs` gets the arguments that it names. The reward is the weighted sum, without functions that return [None].
    """

    response_ids: list[int]
    """Tokens of the response, set by the rollout before `step`."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        """Args: env_config: `functions` (`module:function`) and their `weights`.

        Raises: ValueError if a function cannot be imported or asks for a column that the row does not have.
        """
        super().__init__()
        self._text = extras.get("prompt")
        self._columns = {name: [value] for name, value in extras.items() if name not in NOT_COLUMNS}
        names = list(env_config["functions"])
        self._functions = {name: imported(KEY, name) for name in names}
        self._weights = dict(zip(names, env_config["weights"], strict=True))
        for name, function in self._functions.items():
            self._check(name, function)

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        self._prompt = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        is_text = isinstance(self._text, str)
        given = {
            **self._columns,
            "prompts": [self._text if is_text else self._prompt],
            "completions": [action if is_text else [{"role": "assistant", "content": action}]],
            "completion_ids": [self.response_ids],
        }
        results = {name: _called(name, function, given) for name, function in self._functions.items()}
        if waiting := {name: result for name, result in results.items() if inspect.isawaitable(result)}:
            results |= dict(zip(waiting, asyncio.run(_gathered(waiting)), strict=True))
        rewards = {name: _reward(name, result) for name, result in results.items()}
        applicable = {name: reward for name, reward in rewards.items() if reward is not None}
        if not applicable:
            raise ValueError(f"{KEY}: {', '.join(rewards)} returned [None]. At least one function must give a reward")
        return BaseTextEnvStepOutput(
            observations=[],
            reward=sum(self._weights[name] * reward for name, reward in applicable.items()),
            done=True,
            metadata={"rewards": {_label(name, self._functions): reward for name, reward in applicable.items()}},
        )

    def _check(self, name: str, function: Callable[..., Any]) -> None:
        given = {**self._columns, "prompts": [], "completions": [], "completion_ids": []}
        try:
            inspect.signature(function).bind(**_named(function, given))
        except TypeError as error:
            raise ValueError(
                f"{KEY} is {name}, which takes {inspect.signature(function)}: {error}. Its arguments can be prompts, "
                f"completions, completion_ids and the columns {', '.join(self._columns) or '(there are none)'}"
            ) from error


def _named(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def _called(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    with _errors_of(name):
        return function(**_named(function, given))


async def _gathered(awaitables: Mapping[str, Any]) -> list[Any]:
    async def awaited(name: str, awaitable: Any) -> Any:
        with _errors_of(name):
            return await awaitable

    return list(await asyncio.gather(*(awaited(*each) for each in awaitables.items())))


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Name the function in what it raises; the traceback ends at its line."""
    try:
        yield
    except Exception as error:  # a user's function may raise anything
        named = ValueError(f"{KEY} {name} raised {type(error).__name__}: {error}")
        raise named.with_traceback(error.__traceback__) from error


def _reward(name: str, result: Any) -> float | None:
    """The only element; None if the function does not apply to this sample."""
    try:
        values = list(result)
    except TypeError:
        raise ValueError(
            f"{KEY} {name} returned {result!r}: it must return a list with one float for each completion"
        ) from None
    if len(values) != 1:
        raise ValueError(f"{KEY} {name} returned {len(values)} rewards for 1 completion: {result!r}")
    if values[0] is None:
        return None
    try:
        reward = float(values[0])
    except (TypeError, ValueError):
        raise ValueError(f"{KEY} {name} returned {values[0]!r}: a reward must be a float, or None") from None
    if not math.isfinite(reward):
        raise ValueError(f"{KEY} {name} returned {reward}: a reward must be finite")
    return reward


def _label(name: str, names: Mapping[str, Any]) -> str:
    """The function's name, with its module where two have the same."""
    short = name.rpartition(":")[2]
    return short if [other.rpartition(":")[2] for other in names].count(short) == 1 else name.replace(":", ".")
