"""Engines that die before, in and after a weight sync: the real groups, router and sync over fake actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.ranks import UpdateReport
from skyrl_train.service.job import HealthCheckJob, SftJob, TrainJob
from skyrl_train.service.queue import StaleSamples
from skyrl_train.trainer.performance import MemoryReport
from skyrl_train.trainer.residency import Colocated, Residency
from skyrl_train.types import SamplingParams
from skyrl_train.weight_sync.control import SyncCheckFailed
from tests.support.fake_actors import SYNC, FakeEngine, FakeRank, engine_pool, policy_group, ref
from tests.support.job_runners import job_runner

PARAMS = SamplingParams(max_generate_length=4)
FAR_NODE = "f0" * 28
SYNC_CALLS = ["begin_weight_update", "update_weights", "finish_and_resume"]


class Check:
    """A comparison of logprobs that is due at the first sync; it asks the engines and notes when it did."""

    def __init__(self, every: int = 1000) -> None:
        self.every, self.made, self.fails = every, list[int](), False

    def is_due(self, sync: int) -> bool:
        return sync == 1 or sync % self.every == 0

    def has_samples(self, groups: Sequence[Any]) -> bool:
        return bool(groups)

    async def expect(self, policy: PolicyGroup, groups: Sequence[Any]) -> int:
        return policy.policy_version

    async def compare(self, engines: EnginePool, expected: int) -> None:
        await engines.prompt_logprobs([[1, 2]])
        if self.fails:
            raise SyncCheckFailed("engine-0 computes other logprobs")
        self.made.append(expected)


class World:
    """Two engines, replacements for them, and a policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_engines: int, num_spares: int, max_restarts: int) -> None:
        self.actors = [FakeEngine() for _ in range(num_engines + num_spares)]
        self.engines = engine_pool(monkeypatch, *self.actors, num_engines=num_engines, max_restarts=max_restarts)
        self.rank, self.check = FakeRank(), Check()

    async def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy = await policy_group(monkeypatch, self.rank)
        self.sync = WeightSync(self.policy, self.engines, SYNC)
        self.sync.check = self.check
        await self.sync.senders.connect()
        self.residency = Residency(self.sync, (), MemoryReport(self.policy, (), self.engines))

    async def answers(self, count: int = 4) -> list[int]:
        """The version that each answer was sampled from."""
        calls = (self.engines.generate([n, n + 1], PARAMS, str(n)) for n in range(count))
        return [answer.policy_version for answer in await asyncio.gather(*calls)]


def in_world(
    monkeypatch: pytest.MonkeyPatch,
    main: Callable[[World], Awaitable[None]],
    *,
    num_engines: int = 2,
    num_spares: int = 4,
    max_restarts: int = 3,
) -> None:
    async def run() -> None:
        world = World(monkeypatch, num_engines, num_spares, max_restarts)
        await world.connect(monkeypatch)
        try:
            await main(world)
        finally:
            await world.engines.shutdown()

    asyncio.run(asyncio.wait_for(run(), 5))


@pytest.mark.parametrize("call", ["nothing", *SYNC_CALLS, "prompt_logprobs"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_step_continues_wherever_an_engine_dies_between_its_last_answer_and_the_next_request(
    monkeypatch: pytest.MonkeyPatch, call: str, num_engines: int
):
    """ "nothing": it is dead before the sync begins, when a metric is the first thing that it is asked for."""

    async def main(world: World) -> None:
        assert await world.answers() == [0] * 4
        world.policy.versions.current = 1
        world.actors[0].dies_in, world.actors[0].is_alive = call, call != "nothing"
        await world.residency.sync_weights(["a group"])  # type: ignore[list-item]
        assert await world.answers() == [1] * 4
        assert not world.actors[0].is_alive and world.check.made == [1]
        world.policy.versions.current = 2
        await world.residency.sync_weights(())
        assert await world.answers() == [2] * 4 and len(world.engines.actors) == num_engines

    in_world(monkeypatch, main, num_engines=num_engines)


@pytest.mark.parametrize("after", [0, 2, 4])
def test_requests_of_the_only_engine_are_answered_by_its_replacement(monkeypatch: pytest.MonkeyPatch, after: int):
    """It dies before, between or right after its answers; in the last case nobody waits, and the sync replaces it."""

    async def main(world: World) -> None:
        world.actors[0].dies_after_answers = after
        assert await world.answers() == [0] * 4
        assert world.rank.num_sends == (1 if after < 4 else 0), "a rescue beside training mixes versions"
        world.policy.versions.current = 1
        await world.residency.sync_weights(())
        assert await world.answers() == [1] * 4

    in_world(monkeypatch, main, num_engines=1)


def test_a_replacement_during_an_update_waits_for_its_end(monkeypatch: pytest.MonkeyPatch):
    """Rollouts of a streaming source run while the policy is updated; half-updated weights must not be sent."""

    async def main(world: World) -> None:
        world.actors[0].dies_after_answers = 0
        async with world.policy.weights_lock:
            waiting = asyncio.ensure_future(world.answers())
            await asyncio.sleep(0.1)
            assert not waiting.done() and world.rank.num_sends == 0
            world.policy.versions.advance(1)
        assert await waiting == [1] * 4 and world.rank.num_sends == 1

    in_world(monkeypatch, main, num_engines=1)


@pytest.mark.parametrize("call", ["begin_weight_update", "finish_and_resume"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_loss_that_a_request_notices_during_a_sync_is_no_reason_to_end_the_run(
    monkeypatch: pytest.MonkeyPatch, call: str, num_engines: int
):
    """A later query for dead engines then returns none; with one engine the next call of the sync has no target."""

    async def main(world: World) -> None:
        place, engine = world.engines.replicas[0], world.actors[0]

        def notice(*args: Any) -> None:
            engine.is_alive = False
            world.engines.mark_dead(place, "its stream failed")

        engine.answers[call] = notice
        world.policy.versions.current = 1
        await world.sync.publish(())
        assert await world.answers() == [1] * 4

    in_world(monkeypatch, main, num_engines=num_engines)


def test_an_error_that_no_engine_is_to_blame_for_ends_the_sync(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        world.rank.is_alive = False
        with pytest.raises(RemoteFailed, match="policy-0 died when asked to send weights"):
            await world.sync.publish(())
        assert world.rank.called.count("send_weights") == 1

    in_world(monkeypatch, main)


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_an_engine_that_dies_of_every_request_is_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, max_restarts: int
):
    async def main(world: World) -> None:
        for engine in world.actors:
            engine.dies_after_answers = 0
        with pytest.raises(Exception, match="prompt '0', 2 tokens" if max_restarts else "no engine is left"):
            await world.answers()
        assert sum(not engine.is_alive for engine in world.actors) == 1 + max_restarts

    in_world(monkeypatch, main, num_engines=1, num_spares=9, max_restarts=max_restarts)


def test_replacements_are_counted_until_one_has_lived_from_sync_to_sync(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        (place,) = world.engines.replicas
        world.actors[0].dies_after_answers = world.actors[1].dies_after_answers = 0
        assert await world.answers() == [0] * 4, "by the third"
        assert place.restarts == 2
        await world.sync.publish(())
        assert place.restarts == 0

    in_world(monkeypatch, main, num_engines=1)


def test_a_policy_that_was_started_again_sends_to_the_engines_that_are_left(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        await world.sync.publish(())
        await world.policy.kill()
        world.actors[1].is_alive = False
        world.policy.versions.current = 3
        await world.policy.restart()
        await world.sync.publish(())
        assert list(world.rank.engines) == ["engine-0"] and await world.answers() == [3] * 4
        assert world.rank.called.count("open_sender") == 2, "the dead one would be waited for until the deadline"

    in_world(monkeypatch, main, max_restarts=0)


def test_what_is_done_once_for_all_exports_is_done_before_the_engines_pause(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        called = world.rank.called
        assert called.index("prepare_export") < called.index("connect_sender")
        await world.sync.publish(())
        assert called.count("prepare_export") == 1

    in_world(monkeypatch, main)


def test_an_engine_that_a_request_loses_while_senders_are_opened_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        open_sender = world.rank.answers["open_sender"]

        def lose_one(purpose: str, engines: dict[str, FakeEngine], *way: Any) -> Any:
            if len(engines) == 2:
                world.engines.mark_dead(world.engines.replicas[0], "its stream failed")
            return open_sender(purpose, engines, *way)

        world.rank.answers["open_sender"] = lose_one
        await world.sync.senders.disconnect()
        world.rank.called.clear()
        await world.sync.publish(())
        assert list(world.rank.engines) == ["engine-1"]
        assert world.rank.called.count("open_sender") == 2
        assert world.rank.called.count("connect_sender") == 1, "the first sender waits for as many as there were"

    in_world(monkeypatch, main, max_restarts=0)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_killed_policy_has_given_its_memory_back(monkeypatch: pytest.MonkeyPatch, is_alive: bool):
    """Engines that share its devices take theirs next; a rank that died or hangs cannot be asked for its process."""

    async def main(world: World) -> None:
        waited: list[int] = []
        monkeypatch.setattr("skyrl_train.cluster.process.wait_ended", lambda pids, _: waited.extend(pids) or [])
        world.rank.is_alive = is_alive
        await world.policy.kill()
        assert waited == [7] and await world.policy.memory() == []
        world.rank.is_alive = True
        await world.policy.restart()
        monkeypatch.setattr("skyrl_train.cluster.process.wait_ended", lambda pids, _: pids)
        with pytest.raises(RemoteFailed, match=r"processes \[7\] did not end within 60 s"):
            await world.policy.kill()

    in_world(monkeypatch, main)


@pytest.mark.parametrize("is_lost", [True, False])
def test_processes_of_a_dead_node_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_lost: bool):
    async def main(world: World) -> None:
        task = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *args: ref(RayActorError())))
        monkeypatch.setattr("ray.remote", lambda function: task)
        monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": FAR_NODE, "Alive": not is_lost}])
        world.rank.answers["find_place"] = (FAR_NODE, 7, "")
        await world.policy.start({})
        if is_lost:
            await world.policy.kill()
        else:
            with pytest.raises(RemoteFailed, match=r"processes \[7\] did not end"):
                await world.policy.kill()

    in_world(monkeypatch, main)


def test_ranks_without_an_engine_on_their_gpus_open_no_sender(monkeypatch: pytest.MonkeyPatch):
    """Through CUDA IPC a sender waits for the worker on its own GPU; nobody would ever join that of a lost engine."""

    async def main() -> None:
        ranks, actors = [FakeRank(number) for number in range(4)], [FakeEngine(), FakeEngine()]
        engines = engine_pool(monkeypatch, *actors, ranks_each=2)
        policy = await policy_group(monkeypatch, *ranks)
        sync = WeightSync(policy, engines, replace(SYNC, weight_sync_backend="cuda_ipc"))
        await sync.senders.connect()
        await sync.publish(())
        assert [rank.is_open for rank in ranks] == [True] * 4 and [len(rank.engines) for rank in ranks] == [2, 0, 0, 0]
        actors[0].dies_in = "update_weights"
        policy.versions.current = 1
        await sync.publish(())
        assert [rank.is_open for rank in ranks] == [False, False, True, True]
        assert list(ranks[2].engines) == ["engine-1"] and actors[1].policy_version == 1
        assert all(rank.called.count("send_weights") == 3 for rank in ranks), "all take part in every export"

    asyncio.run(asyncio.wait_for(main(), 5))


def test_ranks_that_send_something_else_than_the_first_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """Workers compare with the first rank's digests. The other ranks send the driver one number for all of theirs."""

    async def main() -> None:
        ranks = [FakeRank(number) for number in range(2)]
        policy = await policy_group(monkeypatch, *ranks)
        settings = replace(SYNC, weight_sync_backend="cuda_ipc")
        sync = WeightSync(policy, engine_pool(monkeypatch, FakeEngine(), ranks_each=2), settings)
        await sync.publish(())
        ranks[1].sent = 2
        with pytest.raises(AssertionError, match="ranks sent different weights"):
            await sync.publish(())

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_broken_sync_says_so_before_its_ranks_have_let_go(monkeypatch: pytest.MonkeyPatch):
    """A rank that waits for somebody cannot close its sender before the deadline of that wait."""

    async def main(world: World) -> None:
        def refuse(*args: Any) -> None:
            raise ValueError("a tensor of another shape")

        monkeypatch.setattr("skyrl_train.cluster.senders.CLOSE_SENDER_S", 0.05)
        world.rank.answers |= {"send_weights": refuse, "close": Future()}
        with pytest.raises(RemoteFailed, match="policy-0 failed to send weights: ValueError: a tensor of another"):
            await asyncio.wait_for(world.sync.publish(()), 20)

    in_world(monkeypatch, main)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_service_replaces_an_engine_that_died_between_two_jobs(monkeypatch: pytest.MonkeyPatch, num_engines: int):
    async def main(world: World) -> None:
        service = job_runner(world.policy, world.engines, world.residency)
        world.policy.versions.current = 5
        await world.sync.publish(())
        sends = world.rank.num_sends
        await service.run(HealthCheckJob())
        assert world.rank.num_sends == sends, "nobody was lost"
        world.actors[0].is_alive = False
        await service.run(HealthCheckJob())
        while len(world.engines.actors) < num_engines:
            await asyncio.sleep(0)
            await service.run(HealthCheckJob())
        assert world.rank.num_sends == sends + 1 and await world.answers() == [5] * 4
        assert world.actors[num_engines].policy_version == 5

    in_world(monkeypatch, main, num_engines=num_engines)


def test_a_check_that_found_no_samples_stays_due(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        for version, groups in enumerate([(), (), ["a group"], ["a group"]]):
            world.policy.versions.current = version
            await world.sync.publish(groups)  # type: ignore[arg-type]
        assert world.check.made == [2]

    in_world(monkeypatch, main)


@pytest.mark.parametrize("dies_in", [None, "pause"])
def test_engines_that_compute_other_logprobs_than_the_trainer_stop_serving(
    monkeypatch: pytest.MonkeyPatch, dies_in: str | None
):
    async def main(world: World) -> None:
        world.check.fails, world.actors[0].dies_in = True, dies_in
        with pytest.raises(SyncCheckFailed):
            await world.sync.publish(["a group"])  # type: ignore[list-item]
        assert all(engine.called[-1] in ("pause", "ping") for engine in world.actors[:2])
        assert world.actors[1].called.count("pause") == 1

    in_world(monkeypatch, main)


def test_a_service_sends_again_to_engines_that_compute_other_logprobs_than_its_trainer(monkeypatch: pytest.MonkeyPatch):
    """It has found so while it looked after them, between two jobs."""

    async def main(world: World) -> None:
        service = job_runner(world.policy, world.engines, world.residency, state_path="/s")
        await world.sync.publish(())
        world.check.has_samples, world.check.fails = lambda groups: True, True  # type: ignore[method-assign]
        world.actors[0].is_alive = False
        with pytest.raises(SyncCheckFailed) as error:
            while True:
                await service.run(HealthCheckJob())
                await asyncio.sleep(0)
        with pytest.raises(SyncCheckFailed):
            await service.recover(error.value)
        assert world.actors[1].called[-1] == "pause", "nobody is served by weights that are not the trainer's"
        world.check.fails = False
        assert "restarted at version 0" in await service.recover(error.value)
        assert (
            world.actors[1].called[-2:] == ["finish_and_resume", "prompt_logprobs"] and await world.answers() == [0] * 4
        )

    in_world(monkeypatch, main)


def test_a_version_that_was_served_and_rolled_back_never_gives_its_number_to_other_weights(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its samples would be trained as those of its successor."""

    async def main(world: World) -> None:
        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            states.append((method, args))
            return UpdateReport({"loss": 1.0}, 1.0, 1.0, 1.0, 1.0, None)

        async def update(shards: Any, examples: Any) -> dict[str, float]:
            await world.policy.update(shards, {}, 1)
            return {}

        states: list[tuple[str, tuple[Any, ...]]] = []
        shards = SimpleNamespace(refs=[None], batches=[SimpleNamespace(mini_batches=[None] * 2)])
        world.rank.answers["call"] = call
        tuning = SimpleNamespace(split=lambda examples: shards, update=update)
        world.check.has_samples = lambda groups: True  # type: ignore[method-assign]
        service = job_runner(world.policy, world.engines, world.residency, tuning=tuning, state_path="/s")
        await service.run(SftJob(()))
        assert await world.answers() == [2] * 4
        world.check.every, world.check.fails = 1, True
        with pytest.raises(SyncCheckFailed) as error:
            await service.run(SftJob(()))
        assert world.actors[0].policy_version == 4, "the engines were resumed with it"
        world.check.fails = False
        assert "at version 2" in await service.recover(error.value)
        assert await world.answers() == [2] * 4 and states[-1] == ("load_state", ("/s/a", 2))
        await service.run(SftJob(()))
        assert await world.answers() == [6] * 4 and service.version.policy_version == 6
        stale = TrainJob((), has_logprobs=False, sampled_by={4: "group 0, sample 0"})
        with pytest.raises(StaleSamples):
            await service.run(stale)
        assert "at version 6" in await service.recover(RemoteFailed("policy-0 died"))
        assert states[-1] == ("load_state", ("/s/b", 4)), "the trainer counts its steps"

    in_world(monkeypatch, main)


def test_the_memory_metric_leaves_out_processes_that_do_not_answer(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        report = MemoryReport(world.policy, (), world.engines)
        world.actors[0].is_alive = False
        await report.measure("training")
        whole = {"memory/training/policy_gib": 2, "memory/training/engine_gib": 1, "memory/training/device_free_gib": 3}
        assert report.metrics() == whole
        assert list(world.engines.actors) == ["engine-0", "engine-1"], "a metric judges nobody"
        world.rank.is_alive = False
        await report.measure("training")
        assert report.metrics() == {name: value for name, value in whole.items() if "policy" not in name}
        world.actors[1].is_alive = False
        await report.measure("training")
        assert report.metrics() == {}

    in_world(monkeypatch, main)


@pytest.mark.parametrize("method", ["sleep", "wake_weights", "wake_kv_cache"])
def test_an_engine_that_dies_while_it_falls_asleep_or_wakes_is_dropped(monkeypatch: pytest.MonkeyPatch, method: str):
    async def main(world: World) -> None:
        world.actors[0].dies_in = method
        await getattr(world.engines, method)()
        assert list(world.engines.actors) == ["engine-1"]
        assert world.actors[1].called.count(method) == 1, "asked once: half of it done twice would be wrong"
        world.actors[1].dies_in = method
        with pytest.raises(RemoteFailed, match="no engine is left .*engine-0 died when.*engine-1 died when"):
            await getattr(world.engines, method)()

    in_world(monkeypatch, main, max_restarts=0)


def test_an_engine_whose_loss_is_noticed_twice_is_replaced_once(monkeypatch: pytest.MonkeyPatch):
    """A request notices it while the call that failed asks whether it lives."""

    async def main(world: World) -> None:
        def refuse(**kwargs: Any) -> None:
            raise ValueError("no room")

        def notice(patience_s: float) -> None:
            world.engines.mark_dead(world.engines.replicas[0], "its stream failed")
            raise TimeoutError

        world.actors[0].answers |= {"sleep": refuse, "ping": notice}
        await world.engines.sleep()
        while not world.engines.has_replacement:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert [engine.called for engine in world.actors[2:]] == [["start"], [], [], []]
        assert world.engines.replicas[0].death_cause == "its stream failed"

    in_world(monkeypatch, main)


def test_an_engine_that_lives_and_cannot_sleep_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    async def main(world: World) -> None:
        def refuse(**kwargs: Any) -> None:
            raise ValueError("no room")

        world.actors[0].answers["sleep"] = refuse
        with pytest.raises(RemoteFailed, match="engine-0 failed to fall asleep: ValueError: no room"):
            await world.engines.sleep()
        assert len(world.engines.actors) == 2

    in_world(monkeypatch, main)


def colocated(world: World) -> Colocated:
    return Colocated(world.policy, (), world.engines, world.sync, MemoryReport(world.policy, (), world.engines))


@pytest.mark.parametrize("phase", ["for_saving", "for_training"])
def test_engines_that_fell_asleep_beside_one_that_could_not_are_woken(monkeypatch: pytest.MonkeyPatch, phase: str):
    """It lives and keeps serving, so a service rolls its job back and has all of them serve again."""

    async def main(world: World) -> None:
        def refuse(**kwargs: Any) -> None:
            raise ValueError("no room")

        residency = colocated(world)
        world.actors[0].answers["sleep"] = refuse
        with pytest.raises(RemoteFailed, match="engine-0 failed to fall asleep"):
            await getattr(residency, phase)()
        del world.actors[0].answers["sleep"]
        await residency.for_rollout()
        assert all(engine.called[-2:] == ["wake_kv_cache", "memory"] for engine in world.actors[:2])
        assert world.rank.num_sends == (phase == "for_training"), "weights that were dropped are sent"
        with pytest.raises(RemoteFailed):
            world.actors[0].answers["sleep"] = refuse
            await residency.for_training()
        del world.actors[0].answers["sleep"]
        await residency.for_training()
        assert world.actors[0].called.count("sleep") == 3, "it still holds memory"

    in_world(monkeypatch, main)
