"""Checks of the rollout, source and sinks that the configuration names by `module:attribute`, imported before a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from skyrl_train.config import Config
from skyrl_train.imports import imported, require_unedited
from skyrl_train.spelling import nearest

SOURCES = ("on_policy", "streaming")
METHODS = ("next", "metrics", "state", "resume")
SINK_METHODS = ("log", "close")


def custom_problems(config: Config) -> Iterator[str]:
    """Names that cannot be imported, and objects with the wrong signature."""
    yield from edited_problems(config)
    yield from rollout_problems(config)
    yield from reward_problems(config)
    source, prepare = config.trainer.source, config.trainer.prepare
    if prepare is not None and ":" in prepare:
        yield from imported_problems("trainer.prepare", prepare, _prepare_problems)
    if ":" in source:
        yield from imported_problems("trainer.source", source, _source_problems)
    elif source not in SOURCES:
        close = nearest(source, SOURCES)
        hint = f"did you mean {close}? " if close else "unknown source. "
        yield f"trainer.source is {source!r}: {hint}It must be {' or '.join(SOURCES)}, or your own module:attribute"


def edited_problems(config: Config) -> Iterator[str]:
    """Own modules whose files have changed since this process imported them: ranks would run other code."""
    values = vars(config.trainer.algorithm).values()
    texts = (text for value in values for text in (value if isinstance(value, tuple) else (value,)))
    names = [text.partition(":")[0] for text in texts if isinstance(text, str)]
    for name in dict.fromkeys([*config.trainer.custom_modules, *names]):
        try:
            require_unedited(name)
        except ValueError as error:
            yield str(error)


def reward_problems(config: Config) -> Iterator[str]:
    """Reward functions that cannot be imported, that no row could use, or without a weight each."""
    environment = config.environment
    for name in environment.reward_fn:
        yield from imported_problems("environment.reward_fn", name, _reward_fn_problems)
    num_weights, num_functions = len(environment.reward_weights), len(environment.reward_fn)
    if num_weights and num_weights != num_functions:
        yield (
            f"environment.reward_weights has {num_weights} weights for the {num_functions} functions of "
            "environment.reward_fn. Write one for each, or [] for equal ones"
        )
    weights, algorithm = set(environment.reward_weights), config.trainer.algorithm
    if algorithm.advantage_estimator == "gdpo" and weights - {1.0}:
        yield (
            f"environment.reward_weights is {list(environment.reward_weights)}: gdpo weighs the normalised rewards by "
            "trainer.algorithm.gdpo_reward_weights, not by these. Move them there, as {NAME: weight}"
        )
    if len(set(environment.reward_fn)) < num_functions:
        yield f"environment.reward_fn is {list(environment.reward_fn)}: a function is named twice. Change its weight"
    if environment.reward_fn and environment.env_class != "reward_fn":
        yield (
            f"environment.reward_fn is set and environment.env_class is {environment.env_class}: both score the same "
            "rows. Remove one of them, or set environment.env_class=reward_fn"
        )
    if environment.env_class == "reward_fn" and not environment.reward_fn:
        yield "environment.env_class is reward_fn and environment.reward_fn is empty. Name a module:function"


def _reward_fn_problems(found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"it is a {type(found).__name__}. Define `def reward(completions, **kwargs)`"


def rollout_problems(config: Config) -> Iterator[str]:
    generator = config.generator
    if generator.rollout is not None:
        yield from imported_problems("generator.rollout", generator.rollout, _rollout_signature_problems)
    one_message, step_wise = not generator.use_conversation_multi_turn, generator.step_wise_trajectories
    if step_wise and one_message:
        yield (
            "generator.step_wise_trajectories is true: a conversation that is one message has no turns to train one by "
            "one. Set generator.use_conversation_multi_turn=true"
        )
    for key, is_set in (("step_wise_trajectories", step_wise), ("use_conversation_multi_turn", one_message)):
        if is_set and generator.rollout is not None:
            yield (
                f"generator.{key} is {str(step_wise and key.startswith('step')).lower()}: it is about the default "
                f"rollout, and generator.rollout is {generator.rollout}. Remove one of them"
            )
    if step_wise and generator.max_turns > 1 and config.trainer.algorithm.distillation.distillation_hint is not None:
        yield (
            "trainer.algorithm.distillation.distillation_hint is set: the prompt of a later turn is not that of the "
            "row, so the hint cannot be inserted. Set generator.step_wise_trajectories=false"
        )


def imported_problems(key: str, name: str, problems: Any) -> Iterator[str]:
    """Problems of the object `module:attribute`. Args: problems: found object -> ends of sentences about it."""
    try:
        found = imported(key, name)
    except ValueError as error:
        yield str(error)
        return
    for problem in problems(found):
        yield f"{key} is {name}: {problem}"


def logger_problems(names: Sequence[str]) -> Iterator[str]:
    """Own sinks of metrics that cannot be imported or lack a method."""
    for name in names:
        if ":" in name:
            yield from imported_problems("trainer.logger", name, _sink_problems)


def _sink_problems(found: Any) -> Iterator[str]:
    if not callable(found) or not takes(found, 3):
        yield "it must be a class that is built from (run_dir, config, steps_done)"
    elif inspect.isclass(found) and (missing := [name for name in SINK_METHODS if not _defines(found, name)]):
        yield f"it has no {', '.join(missing)}. A sink has log(step, metrics) and close()"


def _prepare_problems(found: Any) -> Iterator[str]:
    if not callable(found) or not takes(found, 1):
        yield "it must be a function of the configuration, which creates missing files"


def _rollout_signature_problems(found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"it is a {type(found).__name__}. Define `async def rollout(prompt, sampling_params, engines)`"
    elif not is_async(found):
        yield "it is not async. Define it with `async def`"
    elif not takes(found, 3):
        yield f"it takes {inspect.signature(found)}. It must take (prompt, sampling_params, engines)"


def _source_problems(found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"it is a {type(found).__name__}. Name a class or function that returns a source for SourceParts"
        return
    if not takes(found, 1):
        yield f"it takes {inspect.signature(found)}. It must take one argument, SourceParts"
    if inspect.isclass(found):
        if missing := [method for method in METHODS if not _defines(found, method)]:
            yield f"it has no {', '.join(missing)}. A source has {', '.join(METHODS)}"
        elif not is_async(getattr(found, METHODS[0])):
            yield "its next is not async. Define it with `async def`"


def _defines(found: type, method: str) -> bool:
    """Whether a class has the method, not only an empty one inherited from a protocol."""
    owner = next((owner for owner in found.__mro__ if method in vars(owner)), None)
    return owner is not None and not getattr(owner, "_is_protocol", False)


def is_async(found: Any) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)


def takes(found: Any, num_arguments: int) -> bool:
    """Whether it can be called with this many positional arguments."""
    try:
        inspect.signature(found).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # some functions in C have no readable signature
        return True
    return True
