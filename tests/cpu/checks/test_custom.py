"""Rollouts and sources of the user's own are imported and looked at before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.checks.custom import SOURCES, custom_problems
from skyrl_train.config import load_config
from skyrl_train.rollout import source

MODULE = """
from skyrl_train.rollout.source import GroupSource

async def rollout(prompt, sampling_params, engines): ...
def not_async(prompt, sampling_params, engines): ...
async def two(prompt, sampling_params): ...
async def more(prompt, sampling_params, engines, *, temperature=1.0): ...
class Object:
    async def __call__(self, prompt, sampling_params, engines): ...
an_object = Object()
NUMBER = 3

class Source:
    def __init__(self, parts): ...
    async def next(self): ...
    def metrics(self): ...
    state = None
    def resume(self, state): ...
class NoNext:
    def __init__(self, parts): ...
    def metrics(self): ...
    state = None
class Heir(GroupSource):
    def __init__(self, parts): ...
    async def next(self): ...
class NextIsNotAsync(Source):
    def next(self): ...
class NoArguments(Source):
    def __init__(self): ...
def source(parts): ...
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_things.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_things", None)


def problems(*overrides: str) -> list[str]:
    return list(custom_problems(load_config(overrides)))


@pytest.mark.parametrize(
    "override",
    [
        "generator.rollout=own_things:rollout",
        "generator.rollout=own_things:more",
        "generator.rollout=own_things:an_object",
        "trainer.source=own_things:Source",
        "trainer.source=own_things:source",
        "trainer.source=on_policy",
    ],
)
def test_what_can_be_called_as_it_will_be_is_accepted(override: str):
    assert problems(override) == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("generator.rollout=own_things", "generator.rollout is 'own_things': write module:attribute"),
        ("generator.rollout=own_things:rolout", "own_things.py) has no rolout"),
        ("generator.rollout=no_such_module:f", "no_such_module cannot be imported (ModuleNotFoundError: No module"),
        ("generator.rollout=own_broken:f", "own_broken cannot be imported (ModuleNotFoundError: No module named 'no_s"),
        ("generator.rollout=own_things:not_async", "it is not async. Define it with `async def`"),
        (
            "generator.rollout=own_things:two",
            "takes (prompt, sampling_params). It must take (prompt, sampling_params, e",
        ),
        ("generator.rollout=own_things:NUMBER", "it is a int. Define `async def rollout(prompt"),
        ("trainer.source=on_polic", "did you mean on_policy? It must be on_policy or streaming, or your own"),
        ("trainer.source=own_things:NUMBER", "it is a int. Name a class or function that returns a source"),
        ("trainer.source=own_things:NoNext", "it has no next, resume. A source has next, metrics, state, resume"),
        ("trainer.source=own_things:Heir", "it has no metrics, state, resume. A source has next, metrics, state, res"),
        ("trainer.source=own_things:NextIsNotAsync", "its next is not async"),
        ("trainer.source=own_things:NoArguments", "takes (). It must take one argument, SourceParts"),
    ],
)
def test_what_cannot_work_is_one_sentence_with_key_value_and_remedy(override: str, problem: str):
    (found,) = problems(override)
    assert problem in found and found.startswith(override.partition("=")[0])


def test_the_names_of_sources_are_those_of_the_table():
    assert set(SOURCES) == source.SOURCES.keys()


def test_what_prepares_a_run_is_a_function_of_its_configuration():
    assert problems("trainer.prepare=own_things:source") == []
    for name in ("NUMBER", "NoArguments"):
        (found,) = problems(f"trainer.prepare=own_things:{name}")
        assert found.startswith(f"trainer.prepare is own_things:{name}: it must be a function of the configuration")
