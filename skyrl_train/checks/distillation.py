"""Checks of teachers and of the hints in their prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from string import Formatter
from typing import Any

from skyrl_train.algorithms.build import build_objective
from skyrl_train.checks.custom import imported_problems, is_async, takes
from skyrl_train.checks.engines import SERVER_URL, api_key_problems
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig

log = logging.getLogger(__name__)
HINT = "trainer.algorithm.distillation.distillation_hint"


def teacher_problems(config: Config) -> Iterator[str]:
    """Problems of teachers and hints that do not fit together."""
    trainer, teacher = config.trainer, config.trainer.teacher
    hint = trainer.algorithm.distillation.distillation_hint
    for source, path in teacher.model.path_of_data_source.items():
        if not isinstance(source, str):
            yield (
                f"trainer.teacher.model.path_of_data_source has {source!r}: data sources are text. Put quotes around it"
            )
        if not isinstance(path, str) or not path:
            yield f"trainer.teacher.model.path_of_data_source.{source} is {path}: it must be the path of a model"
    if hint is not None:
        yield from _hint_problems(hint)
    if hint is not None and not teacher.is_there:
        yield (
            f"{HINT} is set, but there is no teacher. Set trainer.teacher.backend=policy, or trainer.teacher.model.path"
        )
    yield from _served_problems(config)
    if teacher.backend != "policy":
        return
    if teacher.model.path is not None or teacher.model.path_of_data_source:
        yield (
            "trainer.teacher.backend is policy and trainer.teacher.model has a path: the policy scores its own "
            "samples. Remove the path, or set backend=megatron for a frozen teacher"
        )
    if hint is None:
        yield f"trainer.teacher.backend is policy: without a hint, policy and teacher would be identical. Set {HINT}"


def check_data_sources(config: Config, sources: Set[str]) -> None:
    """Warn of teachers of a data source that no row has. Args: sources: of the training rows.
    Raises: ValueError if a row's data source has no teacher.
    """
    model, key = config.trainer.teacher.model, "trainer.teacher.model.path_of_data_source"
    named = model.path_of_data_source
    if not named or not sources:
        return
    shown = ", ".join(sorted(sources)[:4])
    if unused := sorted(named.keys() - sources):
        log.warning("%s names %s, but the training rows have the data sources %s", key, ", ".join(unused), shown)
    if model.path is None and (missing := sorted(sources - named.keys())):
        raise ValueError(
            f"the data source {missing[0]} has no teacher. Add it to {key}, or set trainer.teacher.model.path, the "
            "teacher of all others"
        )


def _served_problems(config: Config) -> Iterator[str]:
    trainer, teacher = config.trainer, config.trainer.teacher
    given = f"trainer.teacher.backend is {teacher.backend}"
    if teacher.backend == "remote":
        yield from api_key_problems(config.generator)
    for model in teacher.models(1):
        is_url = SERVER_URL.match(str(model.model_path)) is not None
        if is_url != (teacher.backend == "remote"):
            wanted = "a model" if is_url else "a running server, written http://host:port without /v1 or another path"
            yield f"{given} and {model.path_key} is {model.model_path}: it must be {wanted}"
    if not teacher.is_served:
        return
    temperature = config.generator.sampling_params.temperature
    if temperature != 1:
        yield (
            f"{given} and generator.sampling_params.temperature is {temperature:g}: engines score given tokens at "
            "temperature 1 only. Set temperature=1 or backend=megatron"
        )
    if "topk_logprobs" in _needs(trainer.algorithm):
        kind = trainer.algorithm.distillation.distillation_type
        reader = f"distillation_type is {kind}" if kind else "a function reads topk_logprobs"
        yield (
            f"{given} and {reader}: engines report "
            "logprobs of the sampled tokens only. Set distillation_type=advantage or loss, or backend=megatron"
        )
    if teacher.backend == "engine" and trainer.placement.colocate_all:
        yield (
            f"{given} and trainer.placement.colocate_all is true: the engines of a teacher need dedicated devices. "
            "Set backend=megatron, or serve the teacher elsewhere and set backend=remote"
        )


def _needs(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    try:
        return build_objective(algorithm.values, 1.0).needs
    except ValueError:  # reported with the algorithm
        return ()


def _hint_problems(hint: str) -> Iterator[str]:
    if "{" not in hint:
        yield from imported_problems(HINT, hint, _function_problems)
        return
    try:
        fields = [field for _, field, _, _ in Formatter().parse(hint)]
    except ValueError as error:
        yield f"{HINT} is {hint!r}: {error}. Write a literal brace as {{{{ or }}}}"
        return
    if "prompt" not in fields:
        yield f"{HINT} is {hint!r}: it replaces the last user message. Put {{prompt}} where the row's own text belongs"


def _function_problems(found: Any) -> Iterator[str]:
    if not callable(found) or is_async(found) or not takes(found, 2):
        yield "it must be a function of (group, sample) that returns chat messages, or None for the sample's own prompt"
