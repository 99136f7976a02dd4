"""The service's own process: callers who come while it starts, a start that fails, and jobs that take long to read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.session import Cluster
from skyrl_train.config import load_config
from skyrl_train.service import actor
from skyrl_train.service.actor import ServiceActor
from skyrl_train.service.queue import JobQueue, ServiceBroken

CONFIG = load_config([])
CLUSTER = Cluster("", is_local=True, has_gpus=False)


class Reader:
    """Waits for leave to read jobs of more than one row."""

    def __init__(self) -> None:
        self.may_read = threading.Event()

    def sft(self, rows: int) -> int:
        assert rows < 2 or self.may_read.wait(60), "the event loop stood still"
        return rows


class Actor(ServiceActor):
    """Without processes: the start takes 20 ms, and fails where the test asks for it."""

    def __init__(self, failure: str = "") -> None:
        super().__init__("/", CONFIG, CLUSTER, True, {})
        self.failure, self.story, self.jobs = failure, [], []  # type: ignore[var-annotated]

    async def _start_run(self) -> None:
        self.story.append("start")
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.story.append("cancelled")
            raise
        if self.failure:
            raise ValueError(self.failure)
        self._reader: Any = Reader()
        self._processes: Any = SimpleNamespace(engines=SimpleNamespace(urls=()))
        self._runner: Any = SimpleNamespace(version=SimpleNamespace(policy_version=3))
        self._run_dir: Any = SimpleNamespace(path="/runs/x")
        self._queue = JobQueue(self._note, self._recover)  # type: ignore[arg-type]

    async def _note(self, job: Any) -> dict[str, float]:
        self.jobs.append(job)
        if job < 0:
            raise RuntimeError("a rank died")
        self._feed.add({"job": job})
        return {"job": job}

    async def _recover(self, error: Exception) -> str:
        raise RuntimeError("no state")

    async def _stop_run(self) -> None:
        await asyncio.sleep(0.02)
        self.story.append("stopped")

    def _end(self) -> None:
        self.story.append("end")


def run(body: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "END_S", 0.01)
    asyncio.run(body())  # type: ignore[arg-type]


def test_all_callers_during_the_start_wait_for_the_one_start(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        assert await asyncio.gather(*(service.train_sft(0.001) for _ in range(3))) == [{"job": 0.001}] * 3
        assert service.story == ["start"]

    run(body, monkeypatch)


def test_a_start_that_fails_tells_everybody_why_and_the_process_ends_itself(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor("no such model")
        calls = service.state(), service.train_sft(0), service.metrics_after(0, 1)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(one) for one in answers] == ["no such model"] * 3
        await asyncio.sleep(0.03)
        assert service.story == ["start", "end"]

    run(body, monkeypatch)


def test_a_caller_that_disconnects_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        starter = asyncio.ensure_future(service.train_sft(0))
        await asyncio.sleep(0.001)
        starter.cancel()
        assert await service.train_sft(0) == {"job": 0} and service.story == ["start"]

    run(body, monkeypatch)


def test_a_service_can_be_stopped_while_it_starts(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        waiting = asyncio.ensure_future(service.train_sft(0))
        await asyncio.sleep(0.001)
        await service.close()
        with pytest.raises(ServiceBroken, match="was stopped while it started"):
            await waiting
        with pytest.raises(ServiceBroken, match="was stopped"):
            await service.state()
        await asyncio.sleep(0.03)
        assert service.story == ["start", "cancelled", "end"]

    run(body, monkeypatch)


def test_all_callers_that_stop_it_learn_when_it_has_stopped(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        await service.train_sft(0)
        first = asyncio.ensure_future(service.close())
        await service.close()
        assert service.story == ["start", "stopped"]
        await first

    run(body, monkeypatch)


def test_a_job_that_takes_long_to_read_holds_nobody_up_and_is_not_overtaken(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        await service.train_sft(0)
        jobs = [asyncio.ensure_future(service.train_sft(rows)) for rows in (2, 1)]
        await asyncio.sleep(0.01)
        assert service.jobs == [0]
        service._reader.may_read.set()
        await asyncio.gather(*jobs)
        assert service.jobs == [0, 2, 1]

    run(body, monkeypatch)


def test_one_that_can_no_longer_train_says_why_to_every_caller(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        service = Actor()
        await service.train_sft(0)
        assert (await service.state()).broken is None
        with pytest.raises(ServiceBroken):
            await service.train_sft(-0.001)
        assert "(a rank died): no state" in str((await service.state()).broken)
        assert await service.metrics_after(0, 1) == (1, [{"job": 0}]), "of the jobs before"
        with pytest.raises(ServiceBroken, match="can no longer train: .*no state"):
            await service.metrics_after(1, 1)

    run(body, monkeypatch)


def test_a_service_that_can_no_longer_train_has_failed(monkeypatch: pytest.MonkeyPatch):
    class Stopping(Actor):
        _stop_run = ServiceActor._stop_run

    async def nothing(*arguments: Any) -> None:
        pass

    async def body() -> None:
        service, statuses = Stopping(), list[str]()
        with pytest.raises(ServiceBroken, match="no state"):
            await service.train_sft(-1)
        service._health_checks = asyncio.create_task(asyncio.sleep(60))
        service._tracker = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        service._processes.stop, service._run_dir.finish = nothing, statuses.append
        await service.close()
        assert statuses == ["failed"]

    monkeypatch.setattr(actor, "remove_states", nothing)
    run(body, monkeypatch)
