"""Rollouts and sources that the configuration names by `module:attribute`: imported and looked at before a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from skyrl_train.config import Config
from skyrl_train.imports import imported
from skyrl_train.spelling import nearest

SOURCES = ("on_policy",)
METHODS = ("next", "metrics", "state", "resume")
"""Of a source."""


def custom_problems(config: Config) -> Iterator[str]:
    """Names that cannot be imported, and objects that cannot be called as they will be."""
    rollout, source = config.generator.rollout, config.trainer.source
    if rollout is not None:
        yield from _imported_problems("generator.rollout", rollout, _rollout_problems)
    if ":" in source:
        yield from _imported_problems("trainer.source", source, _source_problems)
    elif source not in SOURCES:
        close = nearest(source, SOURCES)
        hint = f"did you mean {close}? " if close else ""
        yield f"trainer.source is {source!r}: {hint}It must be {' or '.join(SOURCES)}, or module:attribute of your own"


def _imported_problems(key: str, name: str, problems: Any) -> Iterator[str]:
    try:
        found = imported(key, name)
    except ValueError as error:
        yield str(error)
        return
    for problem in problems(found):
        yield f"{key} is {name}, {problem}"


def _rollout_problems(found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"which is a {type(found).__name__}: it must be `async def rollout(prompt, sampling_params, engines)`"
    elif not _is_async(found):
        yield "which is not async: define it with `async def`"
    elif not _takes(found, 3):
        yield f"which takes {inspect.signature(found)}: it must take (prompt, sampling_params, engines)"


def _source_problems(found: Any) -> Iterator[str]:
    if not callable(found):
        yield f"which is a {type(found).__name__}: it must be a class or function that makes a source from SourceParts"
        return
    if not _takes(found, 1):
        yield f"which takes {inspect.signature(found)}: it must take one argument, SourceParts"
    if inspect.isclass(found):
        if missing := [method for method in METHODS if not hasattr(found, method)]:
            yield f"which has no {', '.join(missing)}: a source has {', '.join(METHODS)}"
        elif not _is_async(getattr(found, METHODS[0])):
            yield "whose next is not async: define it with `async def`"


def _is_async(found: Any) -> bool:
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)


def _takes(found: Any, num_arguments: int) -> bool:
    """Whether it can be called with so many positional arguments."""
    try:
        inspect.signature(found).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # no signature to read, as of some functions in C
        return True
    return True
