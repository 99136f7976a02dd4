"""The calls of one environment, on its thread."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl_train.data.chat import check_messages
from skyrl_train.envs.registry import make_env
from skyrl_train.faults import described, short
from skyrl_train.rollout.contract import RolloutFailure
from skyrl_train.types import Message, Prompt

_log = logging.getLogger(__name__)


class EnvironmentFailure(RolloutFailure):
    """An environment raised, returned an invalid value, or timed out. `__cause__` is the original error."""

    def __init__(self, *, prompt: Prompt, turn: int, call: str, problem: str) -> None:
        self.env_class, self.uid, self.turn, self.call = prompt.env_class, prompt.uid, turn, call
        super().__init__(f"environment {prompt.env_class!r} failed in {call} ({prompt.name}, turn {turn}): {problem}")


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one response."""

    observations: list[Message]
    reward: float
    done: bool
    named_rewards: Mapping[str, float]


class Episode:
    """One environment for one sample, used once: `start`, `step` until done, `finish`.

    Every method blocks and belongs on an EnvPool thread; calls are serialized. All raise EnvironmentFailure.
    """

    def __init__(self, prompt: Prompt, *, env_config: Any, max_turns: int) -> None:
        self.call = "env.init"
        """The environment's method that was called last."""
        self.metrics: dict[str, Any] = {}
        """Result of `get_metrics`, once finished."""
        self._prompt = prompt
        self._env_config = env_config
        self._max_turns = max_turns
        self._env: BaseTextEnv | None = None
        self._turn = 0
        self._closed = self._abandoned = False
        self._lock = threading.Lock()

    def start(self) -> list[Message]:
        """Create the environment; return the first messages for the policy."""
        with self._running():
            if self._closed:  # abandoned while this call was queued
                return []
            extras = {**self._prompt.extras, "max_turns": self._max_turns}
            with self._failures():
                env = self._env = make_env(self._prompt.env_class, self._env_config, extras)
                return _first_messages(env.init(copy.deepcopy(self._prompt.messages)))

    def step(self, response: str, *, last: bool, token_ids: Sequence[int] = ()) -> Turn:
        """Pass the response to the environment; finish it if it is done or this is the `last` turn.

        Args: token_ids: of the response, which environments find in their attribute `response_ids`.
        """
        with self._running():
            self._turn += 1
            self.call = "env.step"
            with self._failures():
                env = self._made_env()
                env.response_ids = list(token_ids)
                turn = _checked_turn(env.step(response))
            if turn.done or last:
                self._finish()
            return turn

    def finish(self) -> None:
        """Get the environment's metrics and close it."""
        with self._running():
            self._finish()

    def abandon(self) -> None:
        """Close the environment after another failure, if it exists and is open; never raises.

        A call that still runs, such as one that timed out, does that when it returns.
        """
        self._abandoned = True
        if not self._lock.acquire(blocking=False):
            return
        try:
            env, was_closed, self._closed = self._env, self._closed, True
            if env is not None and not was_closed:
                env.close()
        except BaseException:
            _log.warning("env.close of %r failed", self._prompt.env_class, exc_info=True)
        finally:
            self._lock.release()

    def failure(self, problem: str) -> EnvironmentFailure:
        return EnvironmentFailure(prompt=self._prompt, turn=self._turn, call=self.call, problem=problem)

    def _finish(self) -> None:
        with self._failures():
            self.call = "env.get_metrics"
            self.metrics = self._made_env().get_metrics() or {}
            self.call, self._closed = "env.close", True
            self._made_env().close()

    def _made_env(self) -> BaseTextEnv:
        assert self._env is not None, "start comes first"
        return self._env

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._abandoned:
                self.abandon()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # on this thread also SystemExit or CancelledError is the environment's own
            raise self.failure(described(error, __file__)) from error


def _first_messages(output: Any) -> list[Message]:
    if not isinstance(output, tuple | list) or not output or isinstance(output[0], Mapping):
        raise ValueError(f"init must return (messages, info), got {short(output)}. Write `return prompt, {{}}`")
    return check_messages(output[0])


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"step returned {what} {short(value)}; rewards must be numbers") from None


def _checked_turn(output: Any) -> Turn:
    if not isinstance(output, dict) or not {"observations", "reward", "done"} <= output.keys():
        raise ValueError(f"step must return a BaseTextEnvStepOutput (observations, reward, done), got {output!r}")
    reward = _number("reward", output["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"step returned reward {reward}; rewards must be finite")
    named = (output.get("metadata") or {}).get("rewards") or {}
    if not isinstance(named, Mapping):
        raise ValueError(f"step returned metadata with rewards {named!r}: return a dict of numbers by name")
    named = {str(name): _number(f"named reward {name}", value) for name, value in named.items()}
    if not all(map(math.isfinite, named.values())):
        raise ValueError(f"step returned rewards {named}; rewards must be finite")
    return Turn(check_messages(output["observations"]), reward, bool(output["done"]), named)
