"""Memory of engines and trainer on shared devices in each phase, also when a sync fails: over fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.replica import EngineReplica
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.ranks import Moved
from skyrl_train.trainer.performance import MemoryReport
from skyrl_train.trainer.residency import Colocated, Residency
from tests.support.fake_actors import GIB, SYNC, FakeEngine, FakeRank, engine_pool, policy_group

MOVES = ("sleep", "wake_weights", "begin_weight_update", "finish_and_resume", "wake_kv_cache", "policy starts")
DEADLINE_S = 120
"""For what takes a moment, on a machine that may stall."""


class World:
    """One engine that shares the device of one policy rank; `story` says what happened to its memory."""

    def __init__(self) -> None:
        self.engine, self.rank = FakeEngine(), FakeRank()
        self.fails = True

    async def build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engines = engine_pool(monkeypatch, self.engine)
        self.policy = await policy_group(monkeypatch, self.rank)
        sync, report = WeightSync(self.policy, engines, SYNC), MemoryReport(self.policy, (), engines)
        self.engines, self.sync = engines, sync
        await sync.senders.connect()
        self.residency = Colocated(self.policy, (), engines, sync, report)

    def fail(self, method: str) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"no {method}")

        actor = self.rank if method == "send_weights" else self.engine
        self.kept = actor, method, actor.answers.get(method)
        actor.answers[method] = refuse

    def repair(self) -> None:
        actor, method, answer = self.kept
        actor.answers[method] = answer

    @property
    def story(self) -> list[str]:
        return [one for one in self.engine.called if one in MOVES]

    async def start_again(self) -> None:
        async def start() -> None:
            self.engine.called.append("policy starts")

        await self.residency.restart_trainers(start)


def in_world(monkeypatch: pytest.MonkeyPatch, main: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        await world.build(monkeypatch)
        await main(world)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("method", ["wake_weights", "send_weights", "finish_and_resume", "wake_kv_cache"])
def test_engines_are_asleep_before_the_policy_starts_again_whatever_failed(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    """They may hold their weights' memory by then, in which the policy's optimizer would find no room."""

    async def main(world: World) -> None:
        await world.residency.for_rollout()
        await world.residency.for_training()
        world.fail(method)
        with pytest.raises(RemoteFailed, match=f"RuntimeError: no {method}"):
            await world.residency.sync_weights(())
            await world.residency.for_rollout()
        world.repair()
        await world.start_again()
        assert world.story[-2:] == ["sleep", "policy starts"]
        await world.residency.sync_weights(())
        await world.residency.for_rollout()
        update = ["begin_weight_update", "finish_and_resume"]
        assert world.story[-5:] == ["wake_weights", *update, "wake_weights", "wake_kv_cache"]

    in_world(monkeypatch, main)


def test_an_engine_with_half_an_update_gets_a_whole_one_before_it_answers(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        world.fail("send_weights")
        with pytest.raises(RemoteFailed):
            await world.residency.sync_weights(())
        world.repair()
        await world.residency.for_rollout()
        assert world.story.count("finish_and_resume") == 1 and world.rank.num_sends == 1

    in_world(monkeypatch, main)


def test_a_scorer_starts_again_also_if_its_last_start_failed(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        calls: list[str] = []

        async def kill() -> None:
            calls.append("kill")

        async def restart() -> None:
            calls.append("restart")
            if len(calls) == 2:
                raise RemoteFailed("no process")

        model: Any = SimpleNamespace(kill=kill, restart=restart)
        scorers = [ScorerGroup("ref", "ref_logprobs", model, "logprobs")]
        report = MemoryReport(world.policy, (), world.engines)
        world.residency = Residency(world.sync, scorers, report)  # type: ignore[assignment]
        with pytest.raises(RemoteFailed):
            await world.start_again()
        await world.start_again()
        assert calls == ["kill", "restart"] * 2 and world.story == ["policy starts"]

    in_world(monkeypatch, main)


@pytest.mark.parametrize("died", ["before", "in its sleep", "not at all"])
def test_a_checkpoint_needs_no_engine(monkeypatch: pytest.MonkeyPatch, died: str):
    """Its processes have ended before the policy's optimizer takes the memory that they held."""

    async def main(world: World) -> None:
        ended: list[str] = []

        async def end(replica: EngineReplica) -> None:
            await asyncio.sleep(0.05)
            ended.append("engine")

        monkeypatch.setattr(EngineReplica, "end", end)
        (replica,) = world.engines.replicas
        replica.max_restarts = 0
        await world.residency.for_rollout()
        if died == "before":
            world.engines.mark_dead(replica, "it crashed")
        elif died == "in its sleep":
            world.engine.dies_in = "sleep"
        else:
            world.fail("sleep")
            with pytest.raises(RemoteFailed, match="no sleep"):  # it lives, and holds its memory
                await world.residency.for_checkpoint()
            return
        world.rank.answers["reload"] = lambda *parts: ended.append("reload") or Moved(0, 0.0)
        await world.residency.for_checkpoint()
        assert ended == ["engine", "reload"]
        with pytest.raises(RemoteFailed, match="no engine is left"):
            await world.residency.for_rollout()

    in_world(monkeypatch, main)


def test_a_quiet_step_wakes_and_sleeps_once(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        for _ in range(2):
            await world.residency.for_rollout()
            await world.residency.for_training()
            await world.residency.sync_weights(())
        step = ["sleep", "wake_weights", "begin_weight_update", "finish_and_resume"]
        assert world.story == [*step, "wake_weights", "wake_kv_cache", *step]

    in_world(monkeypatch, main)


def test_scorers_are_on_the_devices_one_at_a_time_and_the_policy_scores_for_itself(monkeypatch: pytest.MonkeyPatch):
    async def memory() -> list[dict[str, float]]:
        return [{"reserved": 2.0 * GIB, "free": 1.0 * GIB}]

    async def main(world: World) -> None:
        moves: list[str] = []
        world.rank.moves = moves

        def scorer(name: str) -> ScorerGroup:
            async def move(verb: str) -> Moved:
                moves.append(f"{name} {verb}")
                return Moved(0, 0.0)

            enters, leaves = partial(move, "enters"), partial(move, "leaves")
            model: Any = SimpleNamespace(name=name, memory=memory, reload=enters, offload=leaves)
            return ScorerGroup(name, f"{name}_logprobs", model, "logprobs")

        scorers = [scorer("ref"), scorer("teacher"), ScorerGroup("own", "", world.policy, "")]
        report = MemoryReport(world.policy, scorers, world.engines)
        residency = Colocated(world.policy, scorers, world.engines, world.sync, report)
        for each in scorers:
            await residency.for_scoring(each)
            # The model decides: a critic that left between its values and its update would lose them.
            await residency.for_scoring(each if each.is_policy else ScorerGroup(each.name, "", each.model, ""))
        await residency.for_training()
        assert moves == [
            *("ref enters", "ref leaves", "teacher enters", "teacher leaves"),
            *("enters weights", "enters optimizer"),
        ], "the last two are the policy's"
        metrics = residency.metrics()
        assert metrics["memory/teacher/teacher_gib"] == metrics["memory/ref/teacher_gib"] == 2

    in_world(monkeypatch, main)
