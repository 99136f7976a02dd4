"""Environments by name: skyrl-gym's registry, or `module:Class`."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import load_env_creator

from skyrl_train.faults import described, numbers
from skyrl_train.imports import imported

_log = logging.getLogger(__name__)

BUILT_IN = {
    "addition": "skyrl_train.envs.built_in:AdditionEnv",
    "guess_number": "skyrl_train.envs.built_in:GuessNumberEnv",
    "math_verify": "skyrl_train.envs.math_answers:MathVerifyEnv",
    "reward_fn": "skyrl_train.envs.reward_functions:RewardFunctionEnv",
    "yes_no_maybe": "skyrl_train.envs.built_in:YesNoMaybeEnv",
}

OF_EXAMPLES = frozenset({"llm_as_a_judge"})
"""Environments that examples register, with settings in the base configuration."""


def register_built_in() -> None:
    """Register the built-in environments, except names that the user has registered."""
    for name, entry_point in BUILT_IN.items():
        if name not in skyrl_gym.registry:
            skyrl_gym.register(id=name, entry_point=entry_point)


def make_env(env_class: str, env_config: Any, extras: Mapping[str, Any]) -> BaseTextEnv:
    """A new environment for one sample.

    Args: env_config: passed through (skyrl-gym's environments read its fields as attributes); extras: the row's other
        columns and `max_turns`.
    Raises: ValueError if the name is unknown; errors of the environment's constructor.
    """
    creator = env_creator(env_class)
    if env_class in skyrl_gym.registry:
        return skyrl_gym.make(env_class, env_config=env_config, extras=extras)
    return creator(env_config=env_config, extras=extras)


def env_creator(env_class: str) -> Callable[..., BaseTextEnv]:
    """The class or function that creates environments of this name. Raises: ValueError with the nearest valid names."""
    spec = skyrl_gym.registry.get(env_class)
    if spec is not None:
        return spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    if ":" in env_class:
        env = imported("the environment", env_class)
        if not (isinstance(env, type) and issubclass(env, BaseTextEnv)):
            raise ValueError(f"the environment is {env_class!r}: it is not a subclass of skyrl_gym's BaseTextEnv")
        return env
    raise ValueError(unknown(env_class))


def check_creator(env_class: str) -> None:
    """Raises: ValueError if environments of this name cannot be created by the arguments that they get, or define no
    step; found without creating one.
    """
    creator, spec = env_creator(env_class), skyrl_gym.registry.get(env_class)
    arguments = {**({} if spec is None else spec.kwargs), "env_config": None, "extras": {}}
    try:
        signature = inspect.signature(creator)
    except ValueError:  # a constructor that is not Python's
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = getattr(creator, "__name__", env_class)
        called = ", ".join(f"{argument}=..." for argument in arguments)
        raise ValueError(
            f"the environment is {env_class!r}: it is created as {name}({called}), and takes {signature}: {error}. "
            f"Define {'__init__(self, ' if isinstance(creator, type) else f'{name}('}{', '.join(arguments)})"
        ) from error
    if isinstance(creator, type) and getattr(creator, "step", None) in (None, skyrl_gym.Env.step, BaseTextEnv.step):
        raise ValueError(
            f"the environment is {env_class!r}: {creator.__name__} defines no step. Define step(self, action), which "
            "returns a BaseTextEnvStepOutput"
        )


def is_known(env_class: str) -> bool:
    """Whether the name is registered, that of a class, or one of the base configuration's."""
    return env_class in skyrl_gym.registry or ":" in env_class or env_class in OF_EXAMPLES


def unknown(env_class: str) -> str:
    """Error for a name that is not known."""
    close = difflib.get_close_matches(env_class, list(skyrl_gym.registry), n=3, cutoff=0.5)
    meant = f" (did you mean {' or '.join(close)}?)" if close else ""
    return (
        f"unknown environment {env_class!r}{meant}. Use one of "
        f"{', '.join(sorted(skyrl_gym.registry))}, or your own `module:Class`. To register it, write "
        f"skyrl_gym.register(id={env_class!r}, entry_point='module:Class') in a module and name that module in "
        "trainer.custom_modules"
    )


def row_problem(env_class: str, env_config: Any, extras: Mapping[str, Any]) -> str | None:
    """Why an environment of skyrl-gym or of this package cannot be created for a row; None if it can.

    The environment is closed at once. Other environments may be expensive to create: they are not tried.
    """
    spec = skyrl_gym.registry.get(env_class)
    if spec is None or not str(spec.entry_point).startswith(("skyrl_gym.", "skyrl_train.")):
        return None
    try:
        make_env(env_class, env_config, extras).close()
    # Anything that a constructor raises, such as AssertionError for a column that is missing.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def aggregate_env_metrics(env_class: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of many samples, aggregated by the environment's `aggregate_metrics`.

    If that raises, there are none and the error is logged: the samples may be trained already. Metrics of samples
    whose env_class names no environment are averaged.
    """
    default = BaseTextEnv.aggregate_metrics  # averages only numbers of Python
    try:
        creator: Any = env_creator(env_class)
    except ValueError:  # a name that a user's source gave them
        creator = BaseTextEnv
    aggregate = getattr(creator, "aggregate_metrics", default)
    try:
        owner = f"environment {env_class}"
        given = [numbers(each, owner) if aggregate is default else dict(each) for each in metrics]
        return numbers(dict(aggregate(given) or {}), owner)
    except (Exception, SystemExit) as error:
        problem = described(error, __file__)
        _log.error("metrics of the environment %s are left out: aggregate_metrics raised %s", env_class, problem)
        return {}
