"""Faults of users' own code: its name, where it raised, and what is wrong with the samples that it made."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_train.types import Sample

log = logging.getLogger(__name__)
SHOWN = 3
PACKAGE = str(Path(__file__).parent)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
TENSORS: Mapping[str, tuple[Callable[[torch.dtype], bool], str]] = {
    "token_ids": (lambda kind: kind == torch.int64, "int64"),
    "loss_mask": (lambda kind: kind == torch.bool, "bool"),
    "rollout_logprobs": (lambda kind: kind.is_floating_point, "float32"),
    "rewards": (lambda kind: not kind.is_complex, "float64"),
}
"""Field of a sample -> its dtypes, and the one to propose."""
KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "prompt_length": (Integral, "a whole number"),
    "turns": (Integral, "a whole number"),
    "policy_version": (Integral, "a whole number"),
    "stop_reason": (str, "stop or length"),
    "ends_conversation": ((bool, np.bool_), "True or False"),
    "transcript": ((list, tuple), "a list of messages"),
    "version_spans": ((list, tuple), "a tuple of (version, number of tokens)"),
    "env_metrics": (Mapping, "a dict"),
    "named_rewards": (Mapping, "a dict of numbers by name"),
}
"""Other field -> its types, and these in words."""


def name_of(made: Any) -> str:
    """A function, class or callable object as `module:name`."""
    while isinstance(made, partial):
        made = made.func
    if not hasattr(made, "__qualname__"):
        made = type(made)
    return f"{made.__module__}:{made.__qualname__}"


def is_of_package(made: object) -> bool:
    """Whether a function or class is this package's."""
    return str(getattr(made, "__module__", "")).partition(".")[0] == "skyrl_train"


def require_returns(kind: type) -> None:
    """Have every `get_*` method of a user's class that overrides one of this package raise ValueError if it returns
    None, unless the annotation of the overridden method ends with None.
    """
    for name, method in list(vars(kind).items()):
        if not (name.startswith("get_") and inspect.isfunction(method)) or is_of_package(method):
            continue
        base = next((base for base in kind.__mro__[1:] if is_of_package(base) and name in vars(base)), None)
        returns = "None" if base is None else str(vars(base)[name].__annotations__.get("return", "None"))
        if base is not None and not returns.endswith("None"):
            setattr(kind, name, _returning(method, f"{base.__name__}.{name}", returns))


def _returning(method: Callable[..., Any], overridden: str, returns: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if (made := method(*args, **kwargs)) is None:
            place, kind = method.__code__, "" if returns == "Any" else f", {returns}"
            raise ValueError(
                f"{name_of(method)} ({place.co_filename}:{place.co_firstlineno}) returned None: it must return what "
                f"{overridden} returns{kind}. Add its `return`"
            )
        return made

    return checked


def described(error: BaseException, caller: str) -> str:
    """An error of own code with its type and line. Args: caller: like `where`."""
    return f"{type(error).__name__}: {error}{where(error, caller)}"


def where(error: BaseException, caller: str) -> str:
    """Innermost line of own code, or else of a library. Args: caller: file that called it, which does not count."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != caller]
    outside = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<"))]
    own = [frame for frame in outside if not frame.filename.startswith(LIBRARIES)]
    chosen = own or outside or frames
    return f" ({chosen[-1].filename}:{chosen[-1].lineno})" if chosen else ""


def numbers(metrics: Mapping[str, Any], owner: str) -> dict[str, float]:
    """The numbers among metrics of own code, those of numpy and torch as Python's. Text and None are not metrics; what
    else is left out is said once. Args: owner: as in "environment search".
    """
    plain = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in metrics.items()}
    for name, value in plain.items():
        if not isinstance(value, int | float | str | None):
            omitted(owner, name, f"it is a {type(value).__name__}, not a number")
    return {name: value for name, value in plain.items() if isinstance(value, int | float)}


@functools.cache  # once
def omitted(owner: str, name: str, reason: str) -> None:
    """Warn, once, of a metric that is left out."""
    log.warning("the metric %s of the %s is left out: %s", name, owner, reason)


def plain_json(value: Any, name: str) -> Any:
    """A copy in JSON values that JSON does not change; numbers of numpy and torch become Python's.

    Tuples become lists. Raises: TypeError naming the entry for anything else, such as a set or a key that is not text.
    Args: name: of the value in the error.
    """
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, Mapping):
        if others := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name} has the key {short(others[0])}")
        return {key: plain_json(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if not isinstance(value, str | int | float | None):
        raise TypeError(f"{name} is {short(value)}")
    return value


def is_cancellation(error: BaseException) -> bool:
    """Whether it comes of the current task's cancellation, perhaps turned into another error by own code, which may
    also raise CancelledError by itself, as async clients do.
    """
    context = None if error.__suppress_context__ else error.__context__
    is_of_cancel = any(isinstance(each, asyncio.CancelledError) for each in (error, error.__cause__, context))
    task = asyncio.current_task()
    return is_of_cancel and task is not None and task.cancelling() > 0


def passes(error: BaseException, file: str) -> bool:
    """Whether the error comes out of a function of the file."""
    return any(frame.filename == file for frame in traceback.extract_tb(error.__traceback__))


def listed(faults: Sequence[str]) -> str:
    """The first faults, and how many more there are."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def faults_of(sample: Sample, vocab_size: int | None = None) -> list[str]:
    """What keeps a sample from being trained, each as `has ...`; empty if it can be. Takes microseconds.

    Args: vocab_size: the policy's, None if unknown.
    """
    if not isinstance(sample, Sample):
        return [f"is {short(sample)}: it must be a skyrl_train.types.Sample"]
    return list(_wrong_types(sample)) or list(_wrong_values(sample, vocab_size))


def _wrong_types(sample: Sample) -> Iterator[str]:
    for name, (is_allowed, dtype) in TENSORS.items():
        value: Any = getattr(sample, name)
        if not (isinstance(value, Tensor) and is_allowed(value.dtype) and value.dim() == 1 and value.is_cpu):
            yield f"has {short(value)} as {name}: it must be a tensor of one {dtype} per token, on the CPU"
    for name, (kinds, words) in KINDS.items():
        value = getattr(sample, name)
        if not isinstance(value, kinds):
            yield f"has {short(value)} as {name}: it must be {words}"
        elif name == "transcript":
            for message in sample.transcript:
                if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                    yield f"has {short(message)} in transcript: each message must be a dict with role and content"
                    break


def _wrong_values(sample: Sample, vocab_size: int | None) -> Iterator[str]:
    lengths = [len(getattr(sample, name)) for name in TENSORS]
    if len(set(lengths)) > 1:
        yield "has {} token_ids, {} loss_mask, {} rollout_logprobs and {} rewards: the numbers must be equal".format(
            *lengths
        )
    if lengths[0] == 0:
        yield "has no tokens: it needs those of its prompt"
    elif (lowest := int(sample.token_ids.min())) < 0:
        yield f"has token id {lowest}: ids are those of the policy's tokenizer, from 0"
    elif vocab_size is not None and (highest := int(sample.token_ids.max())) >= vocab_size:
        yield f"has token id {highest}: the policy's vocabulary has {vocab_size} tokens, from 0 to {vocab_size - 1}"
    if lengths[1] and bool(sample.loss_mask[0]):
        yield "has loss_mask True for its first token, which nothing predicts: begin with the prompt's tokens"
    if not 0 <= sample.prompt_length <= lengths[0]:
        yield f"has prompt_length {sample.prompt_length} of {lengths[0]} tokens: it must be the prompt's number of them"
    if not (are_finite := torch.isfinite(sample.rewards)).all():
        token = int(are_finite.long().argmin())
        reward = float(sample.rewards[token])
        yield f"has reward {reward} at token {token}: the rollout or environment must return finite rewards"
    for name, named in sample.named_rewards.items():
        if not _is_finite(named):
            yield f"has named reward {name} {short(named)}: the rollout or environment must return finite numbers"
    if not all(map(_is_span, sample.version_spans)):
        yield f"has {short(sample.version_spans)} as version_spans: each must be (version, number of tokens)"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):
        return False


def _is_span(span: Any) -> bool:
    return isinstance(span, list | tuple) and len(span) == 2 and all(isinstance(part, Integral) for part in span)


def short(value: object) -> str:
    """Type of a value, and its shape or first 60 characters."""
    if isinstance(value, Tensor):
        return f"a tensor of dtype {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
