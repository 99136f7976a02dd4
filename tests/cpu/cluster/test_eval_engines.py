"""Engines that are reserved for evaluation, beside those of training: the real pools and syncs over fake actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skyrl_train.cluster.demands import ENGINES, demands
from skyrl_train.cluster.eval_engines import EvalEngines
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.config import load_config
from skyrl_train.types import Generate, SamplingParams
from skyrl_train.weight_sync.send_report import SendReport
from tests.support.fake_actors import SYNC, FakeEngine, FakeRank, engine_pool, policy_group

REPORT = SendReport(8, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {"w": 1})


class World:
    """An engine of training, two of evaluation, and replacements for these."""

    async def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.actor = FakeRank(), FakeEngine()
        self.engines = engine_pool(monkeypatch, self.actor)
        self.reserved = [FakeEngine() for _ in range(4)]
        self.pool = engine_pool(monkeypatch, *self.reserved, num_engines=2, max_restarts=1)
        self.policy = await policy_group(monkeypatch, self.rank)
        self.sync = WeightSync(self.policy, self.engines, SYNC)
        self.evaluation = EvalEngines(self.pool, self.policy, SYNC)

    async def train(self) -> None:
        self.policy.versions.advance(1)
        await self.sync.publish(())

    async def versions(self, generate: Generate) -> set[int]:
        """The versions of the engines that answer."""
        params = SamplingParams(max_generate_length=4)
        answers = await asyncio.gather(*(generate([n, n + 1], params, str(n)) for n in range(8)))
        return {answer.policy_version for answer in answers}


def in_world(monkeypatch: pytest.MonkeyPatch, main: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        await world.start(monkeypatch)
        try:
            await main(world)
        finally:
            await world.evaluation.shutdown()

    asyncio.run(asyncio.wait_for(run(), 5))


def test_only_an_evaluation_changes_the_weights_of_its_engines_and_training_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    async def main(world: World) -> None:
        await world.train()
        assert await world.versions(world.evaluation.generate) == {0}
        await world.evaluation.load()
        asked = [actor.num_answered for actor in world.reserved]
        for version in (2, 3):
            await world.train()
            assert await world.versions(world.evaluation.generate) == {1}
            assert await world.versions(world.engines.generate) == {version}
        assert sum(actor.num_answered for actor in world.reserved) == sum(asked) + 16, "none of training's requests"
        await world.evaluation.load()
        assert await world.versions(world.evaluation.generate) == {3}
        assert list(world.rank.opened) == ["training"], "the other sender is closed between two evaluations"
        assert world.rank.called.count("open_sender") == 3, "training connects once"

    in_world(monkeypatch, main)


def test_an_evaluation_continues_with_its_version_when_one_of_its_engines_dies(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        await world.train()
        await world.evaluation.load()
        await world.train()
        world.reserved[0].dies_after_answers = world.reserved[0].num_answered + 1
        assert await world.versions(world.evaluation.generate) == {1}
        assert await world.versions(world.engines.generate) == {2} and len(world.pool.actors) == 1
        await world.evaluation.load()
        assert await world.versions(world.evaluation.generate) == {2} and len(world.pool.actors) == 2

    in_world(monkeypatch, main)


def test_the_replacement_of_all_engines_leaves_no_sender_open(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        await world.train()
        await world.evaluation.load()
        await world.train()
        for actor in world.reserved[:2]:
            actor.dies_after_answers = actor.num_answered
        assert await world.versions(world.evaluation.generate) == {2}, "the replacement has newer weights"
        assert list(world.rank.opened) == ["training"]

    in_world(monkeypatch, main)


def test_the_two_kinds_of_engines_never_receive_weights_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """All ranks take part in an export, so that the tensors of two would mix."""

    async def main(world: World) -> None:
        events: list[str] = []
        world.rank.answers["send_weights"] = lambda purpose, settings: events.append(purpose) or REPORT
        for actor in (world.actor, *world.reserved[:2]):
            actor.answers |= {"begin_weight_update": lambda: events.append("begin")}
            actor.answers |= {"finish_and_resume": lambda *args: events.append("end")}
        await asyncio.gather(world.evaluation.load(), world.train())
        whole = ["begin", "begin", "evaluation", "end", "end"]
        assert events == [*whole, "begin", "training", "end"]

    in_world(monkeypatch, main)


def test_reserved_engines_are_some_of_those_that_the_configuration_places():
    config = load_config(["generator.num_inference_engines=4", "generator.eval_num_engines=1"])
    assert {demand.name: demand.count for demand in demands(config)}[ENGINES] == 4
    assert config.generator.num_rollout_engines == 3
    servers = "generator.remote_inference_engine_urls=[http://a:1,http://b:1]"
    remote = load_config(["generator.run_engines_locally=false", servers, "generator.eval_num_engines=1"])
    assert (remote.generator.num_engines, remote.generator.num_rollout_engines) == (2, 1)
