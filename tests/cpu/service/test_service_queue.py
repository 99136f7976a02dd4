"""Jobs of a service: their order, what becomes of those that fail, and who receives the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.service.job import HealthCheckJob, SaveJob, SftJob, TrainJob
from skyrl_train.service.queue import Feed, JobFailed, JobQueue, ServiceBroken, StaleSamples
from skyrl_train.service.runner import JobRunner, check_health
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.publisher import Publisher
from tests.support.job_runners import job_runner

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
        return "still serving version 3"


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
        assert isinstance(bad, JobFailed) and str(bad) == "out of memory; still serving version 3"
        await queue.close()

    asyncio.run(body())


@pytest.mark.parametrize("own", [asyncio.CancelledError(), SystemExit(3)], ids=["cancelled", "exit"])
def test_a_job_whose_own_code_raises_what_ends_a_loop_has_failed_and_the_next_one_runs(own: BaseException):
    async def run(job: str) -> dict[str, float]:
        if job == "bad":
            raise own
        return {"good": 1.0}

    async def recover(error: BaseException) -> str:
        return "nothing has changed"

    async def main() -> None:
        queue = JobQueue(run, recover)
        with pytest.raises(JobFailed, match="nothing has changed"):
            await queue.submit("bad")
        assert await queue.submit("good") == {"good": 1.0} and queue.broken is None
        await queue.close()

    asyncio.run(main())


def test_after_a_failed_recovery_all_waiting_and_later_callers_get_the_reason():
    async def body() -> None:
        work = Work()
        work.cannot_recover = True
        queue = JobQueue(work.run, work.recover)
        answers = await asyncio.gather(*map(queue.submit, ("bad", 1)), return_exceptions=True)
        assert all(isinstance(one, ServiceBroken) and "(out of memory): no state" in str(one) for one in answers)
        with pytest.raises(ServiceBroken, match="the service can no longer train: it could not recover"):
            await queue.submit(1)
        assert work.seen == ["bad"]
        await queue.close()

    asyncio.run(body())


def test_a_caller_that_disconnects_loses_its_answer_and_nothing_else():
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
            await asyncio.sleep(1000)
            raise AssertionError

        queue = JobQueue(Work().run, recover)
        waiting = asyncio.ensure_future(queue.submit("bad"))
        await asyncio.sleep(0.05)
        await queue.close()
        with pytest.raises(ServiceBroken, match="the service was stopped"):
            await asyncio.wait_for(waiting, 60)

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
        waiting = asyncio.ensure_future(feed.after(2, 0.05))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, feed.add, {"n": 3.0})
        time.sleep(0.2)  # the record comes when the time is up
        number, records = await waiting
        assert records + (await feed.after(number, 5))[1] == [{"n": 3.0}], "none is skipped"

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
        self.up, self.updated = [0, 1], [0, 1]

    async def drop_dead(self) -> None:
        self.calls.append("drop lost")

    async def admit_replacements(self) -> None:
        self.calls.append("admit")
        self.num_changes += self.has_come


class Residency:
    def __init__(self, calls: list[str]) -> None:
        self.calls, self.failures = calls, 0

    async def for_rollout(self) -> None:
        self.calls.append("rollout")

    async def for_saving(self) -> None:
        """Nothing to move."""

    async def for_training(self) -> None:
        """Nothing to move."""

    async def sync_weights(self, groups: object) -> SimpleNamespace:
        self.calls.append("sync")
        self.failures -= 1
        if self.failures >= 0:
            raise RemoteFailed("engine-1 was late")
        return SimpleNamespace(num_bytes=1, seconds=1.0, begin_s=0.1, finish_s=0.1)

    async def restart_trainers(self, restart_policy: Test) -> None:
        await restart_policy()

    def metrics(self) -> dict[str, float]:
        return {}


class Service:
    """A JobRunner whose fine-tuning adds 1 to the version, or fails in a chosen phase."""

    def __init__(self, state_path: str | None = None) -> None:
        self.policy, self.fails_in = Policy([]), ""
        self.calls = self.policy.calls
        self.engines, self.residency = Engines(self.calls), Residency(self.calls)
        self.runner: JobRunner = job_runner(
            self.policy, self.engines, self.residency, tuning=self, state_path=state_path
        )
        self.run, self.recover = self.runner.run, self.runner.recover

    def split(self, examples: object) -> None:
        if self.fails_in == "split":
            raise ValueError("too long")

    async def update(self, shards: None, examples: object) -> dict[str, float]:
        self.policy.num_updates += 1
        if self.fails_in == "update":
            raise RemoteFailed("policy-0 died")
        self.policy.policy_version += 1
        self.residency.failures = int(self.fails_in == "sync")
        return {}


@pytest.mark.parametrize(
    ("fails_in", "expected"),
    [
        ("split", ["rollout"]),
        ("update", ["drop lost", "admit", "kill", "restart at 1 from a", "sync", "rollout"]),
        ("sync", ["save 2 in b", "sync", "drop lost", "admit", "kill", "restart at 1 from a", "sync", "rollout"]),
    ],
)
def test_after_a_failure_the_last_version_continues_and_its_state_is_never_written_over(
    fails_in: str, expected: list[str]
):
    async def body() -> None:
        service = Service("/s")
        calls, version = service.calls, service.runner.version
        metrics = await service.run(SftJob(()))
        assert calls == ["save 1 in a", "sync", "rollout"] and version.policy_version == 1
        assert metrics["timing/save_state"] > 0
        calls.clear()
        service.fails_in = fails_in
        with pytest.raises((ValueError, RemoteFailed)) as error:
            await service.run(SftJob(()))
        await service.recover(error.value)
        assert calls == expected and version.policy_version == service.policy.policy_version == 1
        calls.clear()
        service.fails_in = ""
        await service.run(SftJob(()))
        assert calls == ["save 2 in b", "sync", "rollout"] and version.policy_version == 2

    asyncio.run(body())


def test_the_time_of_writing_a_state_is_not_that_of_the_sync():
    async def body() -> None:
        timers = Timers()

        async def write() -> None:
            with timers("save_state"):
                await asyncio.sleep(0.05)

        with timers("step"):
            await Publisher(Residency([]), timers, write).publish()  # type: ignore[arg-type]
        times = timers.metrics()
        assert times["timing/save_state"] >= 0.05 and times["timing/save_state"] > times["timing/sync_weights"]

    asyncio.run(body())


async def until_called(service: Service, name: str) -> None:
    """Until it has been called, and a health check more."""
    async with asyncio.timeout(60):
        while name not in service.calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.03)


def test_an_engine_that_was_admitted_during_a_sync_is_given_the_weights_between_jobs():
    async def body() -> None:
        service = Service()
        queue = JobQueue(service.run, service.recover)
        service.engines.updated = [0]
        checking = asyncio.ensure_future(check_health(queue, 0.01))
        await until_called(service, "rollout")
        assert service.calls[:4] == ["drop lost", "admit", "sync", "rollout"]
        await queue.close()
        await asyncio.wait_for(checking, 60)

    asyncio.run(body())


def test_engines_are_looked_after_between_jobs_and_those_that_came_are_given_the_weights():
    async def body() -> None:
        service = Service()
        queue = JobQueue(service.run, service.recover)
        checking = asyncio.ensure_future(check_health(queue, 0.01))
        await until_called(service, "drop lost")
        assert set(service.calls) == {"drop lost"}
        service.engines.has_replacement = True
        await until_called(service, "admit")
        assert set(service.calls) == {"drop lost", "admit"}, "it could not be started"
        service.engines.has_come = True
        await until_called(service, "rollout")
        first = service.calls.index("sync")
        assert service.calls[first - 2 : first + 2] == ["drop lost", "admit", "sync", "rollout"]
        await queue.close()
        await asyncio.wait_for(checking, 60)

    asyncio.run(body())


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_sync_between_jobs_that_fails_is_made_up_for_before_the_trainer_is_given_up(num_failures: int):
    async def body() -> None:
        service = Service("/s")
        service.engines.has_replacement, service.engines.has_come = True, True
        service.residency.failures = num_failures
        with pytest.raises(RemoteFailed) as error:
            await service.run(HealthCheckJob())
        assert await service.recover(error.value) == "nothing was changed; still serving version 0"
        service.engines.has_replacement, service.engines.has_come = False, False
        service.calls.clear()
        if num_failures == 2:
            with pytest.raises(RemoteFailed) as error:
                await service.run(HealthCheckJob())
            assert "was restarted" in await service.recover(error.value)
        else:
            await service.run(HealthCheckJob())
        assert ("kill" in service.calls) == (num_failures == 2) and service.calls[-2:] == ["sync", "rollout"]
        service.calls.clear()
        await service.run(HealthCheckJob())
        assert service.calls == ["drop lost"]

    asyncio.run(body())


def test_a_service_whose_engines_are_all_given_up_between_jobs_is_broken():
    async def body() -> None:
        async def none_is_left() -> None:
            raise RemoteFailed("no engine is left")

        service = Service("/s")
        service.engines.has_replacement = True
        service.engines.admit_replacements = none_is_left  # type: ignore[method-assign]
        queue = JobQueue(service.run, service.recover)
        with pytest.raises(ServiceBroken, match="no engine is left"):
            await queue.submit(HealthCheckJob())
        await queue.close()

    asyncio.run(body())


def test_nobody_looks_after_engines_while_a_job_runs():
    async def body() -> None:
        seen: list[object] = []

        async def run(job: object) -> None:
            seen.append(job)
            await asyncio.sleep(0.05)

        queue = JobQueue(run, Work().recover)
        checking = asyncio.ensure_future(check_health(queue, 0.01))
        await asyncio.gather(queue.submit(1), queue.submit(2))
        assert seen[:2] == [1, 2]
        checking.cancel()
        await queue.close()

    asyncio.run(body())


@pytest.mark.parametrize("sampled_by", [{0: "group 0, sample 2"}, {1: "group 0, sample 0", 2: "group 1, sample 3"}])
def test_samples_of_other_versions_than_the_trained_one_are_refused_when_their_turn_comes(sampled_by: dict[int, str]):
    async def body() -> None:
        service = Service()
        queue = JobQueue(service.run, service.recover)
        job = TrainJob((), False, sampled_by)
        _, refused = await asyncio.gather(queue.submit(SftJob(())), queue.submit(job), return_exceptions=True)
        assert isinstance(refused, StaleSamples)
        version, where = next((version, where) for version, where in sampled_by.items() if version != 1)
        assert str(refused).startswith(
            f"{where} was sampled by version {version}, and the policy is version 1. Sample it"
        )
        assert str(refused).endswith("nothing was changed; still serving version 1") and service.policy.num_updates == 1
        await queue.close()

    asyncio.run(body())


def test_without_kept_states_only_half_an_update_cannot_be_rolled_back():
    async def body() -> None:
        service = Service()
        await service.run(SftJob(()))
        service.fails_in = "split"
        with pytest.raises(ValueError) as refused:
            await service.run(SftJob(()))
        assert await service.recover(refused.value) == "nothing was changed; still serving version 1"
        service.calls.clear()
        with pytest.raises(RemoteFailed) as error:
            await service.run(SaveJob("/full"))
        assert await service.recover(error.value) == "nothing was changed; still serving version 1"
        assert service.calls == ["rollout"], "an engine that is admitted needs weights, and none are sent"
        service.policy.idle = False
        with pytest.raises(RuntimeError, match="keep_state=False"):
            await service.recover(error.value)
        service.fails_in = "update"
        with pytest.raises(RemoteFailed) as error:
            await service.run(SftJob(()))
        with pytest.raises(RuntimeError, match="keep_state=False"):
            await service.recover(error.value)

    asyncio.run(body())


def test_a_failed_job_leaves_adapted_weights_of_the_objective_where_they_were():
    service = Service()
    coefficients = service.runner.step.coefficients

    async def adapts_and_fails() -> None:
        coefficients.kl *= 2
        raise ValueError("the update was refused")

    async def main() -> None:
        service.runner.step.step = adapts_and_fails  # type: ignore[method-assign, assignment]
        before = coefficients.kl
        for _ in range(2):
            with pytest.raises(ValueError, match="refused") as caught:
                await service.run(TrainJob((), has_logprobs=True, sampled_by={}))
            assert "nothing was changed" in await service.recover(caught.value)
            assert coefficients.kl == before

    asyncio.run(main())
