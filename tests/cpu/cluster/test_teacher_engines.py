"""Engines that score samples with the weights of a teacher."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.teacher import TeacherEngines
from tests.support.fake_actors import FakeEngine, engine_pool

PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 10]]


def scored(prompts: list[list[int]]) -> list[list[float]]:
    return [[-float(token) for token in prompt] for prompt in prompts]


class Scoring(FakeEngine):
    """Each logprob is the negative token."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[list[int]]] = []
        self.answers["prompt_logprobs"] = self._scored

    def _scored(self, prompts: list[list[int]]) -> list[list[float]]:
        self.prompts.append(prompts)
        return scored(prompts)


def test_each_prompt_is_scored_by_one_engine_and_returned_in_order(monkeypatch: pytest.MonkeyPatch):
    engines = [Scoring(), Scoring()]
    pool = engine_pool(monkeypatch, *engines)
    assert asyncio.run(TeacherEngines(pool).prompt_logprobs(PROMPTS)) == scored(PROMPTS)
    assert engines[0].prompts == [[[2, 3, 4, 5], [6, 7]]] and engines[1].prompts == [[[8, 9, 10], [1]]]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_dead_engine_costs_a_repetition_and_its_replacement_serves(monkeypatch: pytest.MonkeyPatch, num_engines: int):
    """Without a weight sync: the replacement's checkpoint is the teacher's."""
    engines = [Scoring() for _ in range(num_engines + 1)]
    engines[0].dies_in = "prompt_logprobs"

    async def main() -> list[Any]:
        pool = engine_pool(monkeypatch, *engines, num_engines=num_engines, max_restarts=1)
        teacher = TeacherEngines(pool)
        found = [await teacher.prompt_logprobs(PROMPTS)]
        while pool.replicas[0].replacement is not None and not pool.has_replacement:
            await asyncio.sleep(0)
        return [*found, await teacher.prompt_logprobs(PROMPTS)]

    assert asyncio.run(main()) == [scored(PROMPTS)] * 2
    replacement = engines[-1]
    assert replacement.called[0] == "start" and replacement.called.index("resume") < replacement.called.index(
        "prompt_logprobs"
    )


def test_without_an_engine_left_the_run_ends_and_an_error_of_a_living_one_is_raised(monkeypatch: pytest.MonkeyPatch):
    dead = Scoring()
    dead.dies_in = "prompt_logprobs"
    with pytest.raises(RemoteFailed, match=r"no engine is left \(generator.max_engine_restarts=0\)"):
        asyncio.run(TeacherEngines(engine_pool(monkeypatch, dead)).prompt_logprobs(PROMPTS))
    refuses = Scoring()
    refuses.answers["prompt_logprobs"] = lambda prompts: 1 / 0
    with pytest.raises(RemoteFailed, match="division by zero"):
        asyncio.run(TeacherEngines(engine_pool(monkeypatch, refuses)).prompt_logprobs(PROMPTS))
