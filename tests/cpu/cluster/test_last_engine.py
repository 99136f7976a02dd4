"""What happens while no engine is up and a replacement of the last one is starting."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.eval_engines import EvalEngines
from skyrl_train.cluster.pool.engine_process import StartedEngine
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.engines.protocol import EngineFacts
from skyrl_train.trainer.agreement.sync_check import FirstCheck, SyncCheck
from skyrl_train.types import Generation, SamplingParams, TrainBatch
from tests.cpu.trainer.test_sync_check import LIMITS, group
from tests.support.fake_actors import SYNC, FakeEngine, FakeRank, engine_pool, policy_group


class World:
    """One engine, which dies in its next request, and a replacement that is up once `start` is called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._started: Future[StartedEngine] = Future()
        self._engine, replacement = FakeEngine(), FakeEngine()
        replacement.answers["start"] = self._started
        self.pool: EnginePool = engine_pool(patch, self._engine, replacement, num_engines=1, max_restarts=3)
        self.pool._calls = self.pool.replicas[0].calls = replace(self.pool._calls, timeout_s=60.0)

    async def die(self) -> asyncio.Task[Generation]:
        """Returns: a request that the replacement will answer."""
        self._engine.dies_after_answers = 0
        request = asyncio.ensure_future(self.pool.generate([1, 2], SamplingParams(8), "a"))
        while self.pool.up:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        return request

    def start(self) -> None:
        self._started.set_result(StartedEngine(EngineFacts(1), "node", ()))


def check() -> SyncCheck:
    return SyncCheck(1, "float32", LIMITS, tensor_float=False, max_tokens=12)


def test_a_replacement_that_is_ready_during_a_sync_serves_from_the_next_one(monkeypatch: pytest.MonkeyPatch):
    """It holds the checkpoint's weights, which no request of a later version may see."""
    engines = first, second, synced, late = [FakeEngine() for _ in range(4)]
    started: Future[StartedEngine] = Future()
    gate: Future[None] = Future()
    late.answers["start"] = started

    def finish(version: int, digests: dict[str, int]) -> object:
        synced.policy_version = version
        return gate

    synced.answers["finish_and_resume"] = finish
    pool = engine_pool(monkeypatch, *engines, num_engines=2, max_restarts=3)
    pool._calls = replace(pool._calls, timeout_s=30.0)
    for replica in pool.replicas:
        replica.calls = pool._calls
        replica.settings = replica.settings.changed(weight_sync_timeout_s=30.0)

    async def versions(key: str) -> set[int]:
        requests = (pool.generate([1, 2], SamplingParams(8), f"{key} {number}") for number in range(8))
        return {answer.policy_version for answer in await asyncio.gather(*requests)}

    async def main() -> None:
        policy = await policy_group(monkeypatch, FakeRank())
        policy.versions.current = 5
        sync = WeightSync(policy, pool, SYNC)
        first.is_alive = second.is_alive = False
        await pool.drop_dead()
        publishing = asyncio.create_task(sync.publish(()))
        while "finish_and_resume" not in synced.called:
            await asyncio.sleep(0.01)
        started.set_result(StartedEngine(EngineFacts(1), "node", ()))
        await asyncio.sleep(0.05)
        during = asyncio.create_task(versions("during"))
        await asyncio.sleep(0.05)
        gate.set_result(None)
        await publishing
        assert await during == {5} == await versions("after") and "finish_and_resume" not in late.called
        assert list(await pool.prompt_logprobs([[1, 2]])) == [pool.replicas[0].name], "it cannot be compared either"
        await sync.publish(())
        assert late.called[-1] == "finish_and_resume"

    asyncio.run(main())


def test_the_first_comparison_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world, policy = World(monkeypatch), await policy_group(monkeypatch, FakeRank())
        sync = WeightSync(policy, world.pool, SYNC)
        await sync.senders.connect()
        request = await world.die()
        assert await FirstCheck(check(), policy, world.pool).scores([group(0, 5)]) is None
        world.start()
        assert (await request).token_ids == [2, 1]

    asyncio.run(main())


def test_a_comparison_waits_for_the_replacement(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world, policy = World(monkeypatch), await policy_group(monkeypatch, FakeRank())
        sync = WeightSync(policy, world.pool, SYNC)
        sync.check = check()
        requests = []

        async def logprobs(batch: TrainBatch) -> torch.Tensor:
            requests.append(await world.die())
            asyncio.get_running_loop().call_later(0.1, world.start)
            return torch.zeros(len(batch.token_ids))

        policy.prompt_logprobs = logprobs  # type: ignore[method-assign]
        await sync.publish([group(0, 5)])
        assert sync.check.has_compared and (await requests[0]).token_ids == [2, 1]  # type: ignore[attr-defined]

    asyncio.run(main())


def test_engines_that_are_alive_do_not_wait_for_one_of_evaluations(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        training = engine_pool(monkeypatch, FakeEngine())
        policy: PolicyGroup = await policy_group(monkeypatch, FakeRank())
        world = World(monkeypatch)
        sync, evaluation = WeightSync(policy, training, SYNC), EvalEngines(world.pool, policy, SYNC)
        await sync.publish(())
        await evaluation.load()
        request = await world.die()
        await asyncio.wait_for(sync.publish(()), 10)
        world.start()
        assert (await request).token_ids == [2, 1]

    asyncio.run(main())


def test_an_engine_that_is_admitted_while_senders_connect_waits_for_the_next_sync(monkeypatch: pytest.MonkeyPatch):
    """A stock server has no digests, so nothing else would notice that it has received no weights."""

    async def main() -> None:
        late = FakeEngine()
        pool = engine_pool(monkeypatch, FakeEngine(), late, num_engines=2)
        sync = WeightSync(await policy_group(monkeypatch, FakeRank()), pool, SYNC)
        connect = sync.senders.connect

        async def connect_slowly() -> None:
            await connect()
            pool.num_changes += 1

        sync.senders.connect = connect_slowly  # type: ignore[method-assign]
        with pytest.raises(RemoteFailed, match="was replaced while the weight sync connected"):
            await sync.send_once()
        assert "begin_weight_update" not in late.called

    asyncio.run(main())
