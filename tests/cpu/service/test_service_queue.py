"""Jobs of a service: their order, what becomes of those that fail, and who hears of the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.service.feed import Feed
from skyrl_train.service.job import CareJob, SaveJob, SftJob, TrainJob
from skyrl_train.service.learning import Learning
from skyrl_train.service.queue import JobFailed, JobQueue, ServiceBroken, StaleSamples
from skyrl_train.service.watch import watch
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.learner import Learner as RealLearner

Test = Callable[[], Awaitable[None]]


class Work:
    """Doubles numbers; "bad" raises."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.seen: list[object] = []
        self.recovered: list[str] = []
        self.cannot_recover = False

    async def run(self, job: object) -> object:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.seen.append(job)
        await asyncio.sleep(0.01)
        self.running -= 1
        if job == "bad":
            raise RuntimeError("out of memory")
        return job * 2  # type: ignore[operator]

    async def recover(self, error: Exception) -> str:
        await asyncio.sleep(0.01)
        self.recovered.append(str(error))
        if self.cannot_recover:
            raise RuntimeError("no state")
        return "version 3 goes on"


def test_jobs_run_one_at_a_time_in_the_order_in_which_they_came():
    async def body() -> None:
        work = Work()
        queue = JobQueue(work.run, work.recover)
        assert await asyncio.gather(*(queue.submit(n) for n in range(5))) == [0, 2, 4, 6, 8]
        assert work.seen == [0, 1, 2, 3, 4] and work.most_running == 1
        await queue.close()

    asyncio.run(body())


def test_a_job_that_fails_is_its_callers_trouble_alone_and_heard_of_after_the_recovery():
    async def body() -> None:
        work = Work()
        queue = JobQueue(work.run, work.recover)
        first, bad, last = await asyncio.gather(*map(queue.submit, (1, "bad", 2)), return_exceptions=True)
        assert (first, last) == (2, 4) and work.recovered == ["out of memory"]
        assert isinstance(bad, JobFailed) and str(bad) == "out of memory; version 3 goes on"
        await queue.close()

    asyncio.run(body())


def test_after_a_failed_recovery_all_who_wait_and_all_who_come_are_told_why():
    async def body() -> None:
        work = Work()
        work.cannot_recover = True
        queue = JobQueue(work.run, work.recover)
        answers = await asyncio.gather(*map(queue.submit, ("bad", 1)), return_exceptions=True)
        assert all(isinstance(one, ServiceBroken) and "(out of memory): no state" in str(one) for one in answers)
        with pytest.raises(ServiceBroken, match="the service trains no more: it could not recover"):
            await queue.submit(1)
        assert work.seen == ["bad"]
        await queue.close()

    asyncio.run(body())


def test_a_caller_who_goes_away_loses_its_answer_and_nothing_else():
    async def body() -> None:
        work = Work()
        queue = JobQueue(work.run, work.recover)
        gone = asyncio.ensure_future(queue.submit(1))
        await asyncio.sleep(0.001)
        gone.cancel()
        assert await queue.submit(2) == 4
        assert work.seen == [1, 2] and not work.recovered
        await queue.close()

    asyncio.run(body())


def test_stopping_ends_the_job_in_flight_and_refuses_those_that_wait():
    async def body() -> None:
        work = Work()
        queue = JobQueue(work.run, work.recover)
        waiting = [asyncio.ensure_future(queue.submit(n)) for n in range(3)]
        await asyncio.sleep(0.001)
        await queue.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, ServiceBroken) for one in answers) and work.seen == [0]

    asyncio.run(body())


def test_stopping_in_the_middle_of_a_recovery_answers_the_job_that_failed():
    async def body() -> None:
        async def recover(error: Exception) -> str:
            await asyncio.sleep(30)
            raise AssertionError

        queue = JobQueue(Work().run, recover)
        waiting = asyncio.ensure_future(queue.submit("bad"))
        await asyncio.sleep(0.05)
        await queue.close()
        with pytest.raises(ServiceBroken, match="the service was stopped"):
            await asyncio.wait_for(waiting, 1)

    asyncio.run(body())


def test_every_reader_of_the_metrics_gets_all_records_after_the_one_it_knows():
    async def body() -> None:
        feed = Feed()
        waiting = asyncio.ensure_future(feed.after(0, 5))
        await asyncio.sleep(0)
        feed.add({"n": 1.0})
        feed.add({"n": 2.0})
        assert (await waiting)[1][0] == {"n": 1.0}
        assert await feed.after(0, 5) == (2, [{"n": 1.0}, {"n": 2.0}])
        assert await feed.after(1, 5) == (2, [{"n": 2.0}])
        assert await feed.after(2, 0.01) == (2, [])

    asyncio.run(body())


class Policy:
    """A policy whose version and state are numbers; a call in `fails` raises."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.policy_version, self.num_updates, self.idle = calls, 0, 0, True
        self.num_steps = 0

    async def is_idle(self) -> bool:
        return self.idle

    async def save_hf(self, folder: str) -> None:
        raise RemoteFailed(f"{folder} cannot be written")

    async def save_state(self, folder: str) -> None:
        self.calls.append(f"save {self.policy_version} in {folder[-1]}")

    async def kill(self) -> None:
        self.calls.append("kill")

    async def restart_from(self, folder: str | None, policy_version: int, num_steps: int) -> None:
        self.calls.append(f"restart at {policy_version} from {folder and folder[-1]}")
        self.policy_version = policy_version


class Engines:
    def __init__(self, calls: list[str]) -> None:
        self.calls, self.has_replacement, self.num_changes, self.has_come = calls, False, 0, False

    async def drop_lost(self) -> None:
        self.calls.append("drop lost")

    async def admit_replacements(self) -> None:
        self.calls.append("admit")
        self.num_changes += self.has_come


class Processes:
    def __init__(self, policy: Policy) -> None:
        self.policy, self.reference = policy, None
        self.engines = Engines(policy.calls)


class Residency:
    def __init__(self, calls: list[str]) -> None:
        self.calls, self.failures = calls, 0

    async def for_rollout(self) -> None:
        self.calls.append("rollout")

    async def for_saving(self) -> None:
        """Nothing to move."""

    async def sync_weights(self, groups: object) -> None:
        self.calls.append("sync")
        self.failures -= 1
        if self.failures >= 0:
            raise RemoteFailed("engine-1 was late")

    async def start_again(self, policy: Test, reference: Test) -> None:
        await reference()
        await policy()


class Learner:
    def __init__(self, policy: Policy, calls: list[str]) -> None:
        self.policy, self.residency, self.fails_in = policy, Residency(calls), ""

    async def learn_examples(self, examples: object, *, before_sync: Test) -> dict[str, float]:
        if self.fails_in == "cut":
            raise ValueError("too long")
        self.policy.num_updates += 1
        if self.fails_in == "update":
            raise RemoteFailed("policy-0 died")
        self.policy.policy_version += 1
        await before_sync()
        if self.fails_in == "sync":
            raise RemoteFailed("engine-0 hangs")
        return {}


@pytest.mark.parametrize(
    ("fails_in", "expected"),
    [
        ("cut", ["rollout"]),
        ("update", ["drop lost", "admit", "kill", "restart at 1 from a", "sync", "rollout"]),
        ("sync", ["save 2 in b", "drop lost", "admit", "kill", "restart at 1 from a", "sync", "rollout"]),
    ],
)
def test_after_a_failure_the_last_version_goes_on_and_its_state_is_never_written_over(
    fails_in: str, expected: list[str]
):
    async def body() -> None:
        calls: list[str] = []
        policy = Policy(calls)
        learner = Learner(policy, calls)
        learning = Learning(Processes(policy), learner, Timers(), state_path="/s", max_model_len=9)  # type: ignore[arg-type]
        metrics = await learning.run(SftJob(()))
        assert calls == ["save 1 in a", "rollout"] and learning.policy_version == 1
        assert metrics["timing/save_state"] > 0
        calls.clear()
        learner.fails_in = fails_in
        with pytest.raises((ValueError, RemoteFailed)) as error:
            await learning.run(SftJob(()))
        await learning.recover(error.value)
        assert calls == expected and learning.policy_version == policy.policy_version == 1
        calls.clear()
        learner.fails_in = ""
        await learning.run(SftJob(()))
        assert calls == ["save 2 in b", "rollout"] and learning.policy_version == 2

    asyncio.run(body())


def test_the_time_of_writing_a_state_is_not_that_of_the_sync():
    async def body() -> None:
        learner, timers = RealLearner.__new__(RealLearner), Timers()
        learner._timers, learner.residency = timers, Residency([])  # type: ignore[assignment]

        async def write() -> None:
            with timers("save_state"):
                await asyncio.sleep(0.05)

        with timers("step"):
            await learner._sync((), write)
        times = timers.metrics()
        assert times["timing/save_state"] >= 0.05 > times["timing/sync_weights"]

    asyncio.run(body())


def test_engines_are_looked_after_between_jobs_and_those_that_came_are_given_the_weights():
    async def body() -> None:
        policy = Policy([])
        processes, learner = Processes(policy), Learner(policy, policy.calls)
        learning = Learning(processes, learner, Timers(), state_path=None, max_model_len=9)  # type: ignore[arg-type]
        queue = JobQueue(learning.run, learning.recover)
        watching = asyncio.ensure_future(watch(queue, 0.01))
        await asyncio.sleep(0.05)
        assert set(policy.calls) == {"drop lost"}
        processes.engines.has_replacement = True
        await asyncio.sleep(0.05)
        assert set(policy.calls) == {"drop lost", "admit"}, "it could not be started"
        processes.engines.has_come = True
        await asyncio.sleep(0.05)
        first = policy.calls.index("sync")
        assert policy.calls[first - 2 : first + 2] == ["drop lost", "admit", "sync", "rollout"]
        await queue.close()
        await asyncio.wait_for(watching, 1)

    asyncio.run(body())


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_sync_between_jobs_that_fails_is_made_up_for_before_the_trainer_is_given_up(num_failures: int):
    async def body() -> None:
        policy = Policy([])
        processes, learner = Processes(policy), Learner(policy, policy.calls)
        learning = Learning(processes, learner, Timers(), state_path="/s", max_model_len=9)  # type: ignore[arg-type]
        processes.engines.has_replacement, processes.engines.has_come = True, True
        learner.residency.failures = num_failures
        with pytest.raises(RemoteFailed) as error:
            await learning.run(CareJob())
        assert await learning.recover(error.value) == "nothing was changed, version 0 goes on"
        processes.engines.has_replacement, processes.engines.has_come = False, False
        policy.calls.clear()
        if num_failures == 2:
            with pytest.raises(RemoteFailed) as error:
                await learning.run(CareJob())
            assert "started again" in await learning.recover(error.value)
        else:
            await learning.run(CareJob())
        assert ("kill" in policy.calls) == (num_failures == 2) and policy.calls[-2:] == ["sync", "rollout"]
        policy.calls.clear()
        await learning.run(CareJob())
        assert policy.calls == ["drop lost"]

    asyncio.run(body())


def test_a_service_whose_engines_are_all_given_up_between_jobs_is_broken():
    async def body() -> None:
        async def none_is_left() -> None:
            raise RemoteFailed("no engine is left")

        policy = Policy([])
        processes, learner = Processes(policy), Learner(policy, policy.calls)
        learning = Learning(processes, learner, Timers(), state_path="/s", max_model_len=9)  # type: ignore[arg-type]
        processes.engines.has_replacement = True
        processes.engines.admit_replacements = none_is_left  # type: ignore[method-assign]
        queue = JobQueue(learning.run, learning.recover)
        with pytest.raises(ServiceBroken, match="no engine is left"):
            await queue.submit(CareJob())
        await queue.close()

    asyncio.run(body())


def test_nobody_looks_after_engines_while_a_job_runs():
    async def body() -> None:
        seen: list[object] = []

        async def run(job: object) -> None:
            seen.append(job)
            await asyncio.sleep(0.05)

        queue = JobQueue(run, Work().recover)
        watching = asyncio.ensure_future(watch(queue, 0.01))
        await asyncio.gather(queue.submit(1), queue.submit(2))
        assert seen[:2] == [1, 2]
        watching.cancel()
        await queue.close()

    asyncio.run(body())


@pytest.mark.parametrize("drawn_by", [{0: "group 0, sample 2"}, {1: "group 0, sample 0", 2: "group 1, sample 3"}])
def test_samples_of_other_versions_than_the_trained_one_are_refused_when_their_turn_comes(drawn_by: dict[int, str]):
    async def body() -> None:
        policy = Policy([])
        learning = Learning(
            Processes(policy),  # type: ignore[arg-type]
            Learner(policy, []),  # type: ignore[arg-type]
            Timers(),
            state_path=None,
            max_model_len=9,
        )
        queue = JobQueue(learning.run, learning.recover)
        job = TrainJob((), 1, False, drawn_by)
        _, refused = await asyncio.gather(queue.submit(SftJob(())), queue.submit(job), return_exceptions=True)
        assert isinstance(refused, StaleSamples)
        version, where = next((version, where) for version, where in drawn_by.items() if version != 1)
        assert str(refused).startswith(f"{where} was drawn by version {version}, and the policy is version 1: draw it")
        assert str(refused).endswith("nothing was changed, version 1 goes on") and policy.num_updates == 1
        await queue.close()

    asyncio.run(body())


def test_without_kept_states_only_half_an_update_cannot_be_taken_back():
    async def body() -> None:
        policy = Policy([])
        learner = Learner(policy, policy.calls)
        learning = Learning(Processes(policy), learner, Timers(), state_path=None, max_model_len=9)  # type: ignore[arg-type]
        await learning.run(SftJob(()))
        learner.fails_in = "cut"
        with pytest.raises(ValueError) as refused:
            await learning.run(SftJob(()))
        assert await learning.recover(refused.value) == "nothing was changed, version 1 goes on"
        policy.calls.clear()
        with pytest.raises(RemoteFailed) as error:
            await learning.run(SaveJob("/full"))
        assert await learning.recover(error.value) == "nothing was changed, version 1 goes on"
        assert policy.calls == ["rollout"], "an engine that is admitted needs weights, and none are sent"
        policy.idle = False
        with pytest.raises(RuntimeError, match="keep_state=False"):
            await learning.recover(error.value)
        learner.fails_in = "update"
        with pytest.raises(RemoteFailed) as error:
            await learning.run(SftJob(()))
        with pytest.raises(RuntimeError, match="keep_state=False"):
            await learning.recover(error.value)

    asyncio.run(body())
