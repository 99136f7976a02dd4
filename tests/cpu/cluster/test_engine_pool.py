"""How the driver waits for the engines' answers, against actors of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.pool.router import EngineLostError
from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.engines.remote.client import ServerError
from skyrl_train.engines.settings import still_running
from skyrl_train.engines.vllm.core import Core
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.engines.vllm.weights import Weights
from skyrl_train.types import Generation, SamplingParams
from tests.support.fake_actors import FakeEngine, engine_pool, task_error
from tests.support.settings import changed, engine_settings


def method(answer: Any) -> Any:
    """An actor's method that gives this answer, or raises it; None hangs."""

    def remote(*args: Any) -> Any:
        future: Future[Any] = Future()
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return SimpleNamespace(future=lambda: future)

    return SimpleNamespace(remote=remote)


def engine(*pauses_s: float, error: BaseException | None = None, ping: Any = True) -> Any:
    """An actor that generates an answer after each of these pauses, and then the error."""

    async def results() -> AsyncIterator[Awaitable[Any]]:
        for number, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)
            yield asyncio.sleep(0, number)
        if error is not None:
            raise error

    remote = SimpleNamespace(remote=lambda method, requests: results())
    return SimpleNamespace(stream=SimpleNamespace(options=lambda num_returns: remote), call=method(ping))


def stream_of(group: EnginePool) -> AsyncIterator[Any]:
    return group.replicas[0].generate([], group.mark_dead)


def answers_of(monkeypatch: pytest.MonkeyPatch, actor: Any) -> list[Any]:
    """What the driver got from the engine, deadline 0.2 s."""

    async def read() -> list[Any]:
        return [answer async for answer in stream_of(engine_pool(monkeypatch, actor))]

    return asyncio.run(read())


def test_answers_may_take_long_together(monkeypatch: pytest.MonkeyPatch):
    assert answers_of(monkeypatch, engine(0.12, 0.12, 0.12)) == [0, 1, 2]


def test_an_engine_that_lives_but_takes_too_long_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        RemoteFailed, match="engine-0 finished none .* trainer.timeout_s=0.2 s: the engine is alive.*engine-0.log"
    ):
        answers_of(monkeypatch, engine(0.01, 30))


def test_a_batch_may_wait_as_long_as_the_engine_answers_others(monkeypatch: pytest.MonkeyPatch):
    async def stream(answers: asyncio.Queue[int]) -> AsyncIterator[Awaitable[int]]:
        while True:
            yield asyncio.sleep(0, await answers.get())

    async def main() -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + passed_s)
        actor = engine(ping=task_error(TimeoutError("the engine did not answer")))
        actor.stream.options = lambda num_returns: SimpleNamespace(remote=lambda method, answers: stream(answers))
        pool = engine_pool(monkeypatch, actor)
        replica = pool.replicas[0]
        replica.calls = replace(replica.calls, timeout_s=60.0)
        served, queued = asyncio.Queue[int](), asyncio.Queue[int]()
        answers, late = (replica.generate(each, pool.mark_dead) for each in (served, queued))  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(anext(late))  # type: ignore[arg-type]
        for number in range(3):
            answer = asyncio.ensure_future(anext(answers))  # type: ignore[arg-type]
            await settled()
            passed_s += 50.0
            served.put_nowait(number)
            assert await answer == number
            await settled()
            assert not waiting.done() and replica.is_up
        passed_s += 61.0
        with pytest.raises(EngineLostError, match="engine-0 finished none of its requests within .*=60 s: it hangs"):
            await waiting

    asyncio.run(main())


async def settled() -> None:
    """Let the event loop do all that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_are_aborted_in_the_engine_when_their_callers_leave(monkeypatch: pytest.MonkeyPatch):
    cancelled: list[Any] = []
    monkeypatch.setattr("ray.cancel", cancelled.append)
    monkeypatch.setattr("ray.is_initialized", lambda: True)

    async def leave() -> None:
        reader = asyncio.create_task(anext(stream_of(engine_pool(monkeypatch, engine(30)))))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(leave())
    assert len(cancelled) == 1 and answers_of(monkeypatch, engine(0.0)) == [0] and len(cancelled) == 1


@pytest.mark.parametrize(
    ("actor", "reason"),
    [
        (engine(0.01, 30, ping=task_error(TimeoutError("the engine did not answer"))), "it hangs"),
        (engine(0.01, error=RayActorError()), "engine-0 died when asked to generate"),
        (engine(0.01, error=task_error(EngineDeadError("the core has ended"))), "the core has ended"),
        (engine(error=OutOfMemoryError("Ray killed it"), ping=RayActorError()), "Ray killed it"),
        (engine(error=ObjectLostError("id", "owner", "site"), ping=RayActorError()), "failed to generate"),
        (engine(error=task_error(ServerError("500 of the server")), ping=task_error(ServerError("503"))), "500 of"),
    ],
)
def test_an_engine_that_hangs_or_dies_is_marked_dead(monkeypatch: pytest.MonkeyPatch, actor: Any, reason: str):
    with pytest.raises(EngineLostError, match=reason):
        answers_of(monkeypatch, actor)


def test_an_error_of_an_engine_that_lives_is_not_taken_for_silence(monkeypatch: pytest.MonkeyPatch):
    """Ray raises a TimeoutError of the engine as a TimeoutError of the driver too."""
    error = task_error(TimeoutError("the engine did not answer within 3 s (generating)"))
    assert isinstance(error, TimeoutError)
    with pytest.raises(RemoteFailed, match="engine-0 failed to generate: TimeoutError: .* within 3 s"):
        answers_of(monkeypatch, engine(error=error))


def test_a_request_that_an_engine_refuses_does_not_cost_the_engine(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        group = engine_pool(monkeypatch, engine(error=task_error(ValueError("a prompt of 99 tokens does not fit"))))
        with pytest.raises(RemoteFailed, match="99 tokens does not fit"):
            async for _ in stream_of(group):
                pass
        assert list(group.actors) == ["engine-0"]

    asyncio.run(main())


def test_only_engines_that_do_not_answer_are_dropped(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        hangs, dead = None, RayActorError()
        group = engine_pool(monkeypatch, engine(), engine(ping=hangs), engine(), engine(ping=dead))
        before = group.num_changes
        assert await group.drop_dead() == ["engine-1", "engine-3"]
        assert list(group.actors) == ["engine-0", "engine-2"] and group.num_workers == 2
        assert group.num_changes != before, "senders must reconnect"
        assert await group.drop_dead() == []

    asyncio.run(main())


def test_an_engine_that_woke_and_could_not_resume_resumes_when_it_is_woken_again():
    async def main() -> None:
        class Waking(SimpleNamespace):
            async def wake_up(self, tags: list[str]) -> None:
                self.calls += tags

            async def resume_generation(self) -> None:
                self.calls.append("resume")
                if self.calls.count("resume") == 1:
                    raise TimeoutError

        one = VllmEngine.__new__(VllmEngine)
        llm: Any = Waking(calls=[], errored=False)
        one._core = Core(llm, timeout_s=60)
        one._weights = Weights(one._core, "served", None)
        one._asleep, one._running = {"kv_cache"}, asyncio.Event()
        with pytest.raises(TimeoutError):
            await one.wake_kv_cache()
        await one.wake_kv_cache()
        await one.wake_kv_cache()
        assert llm.calls == ["kv_cache", "resume", "resume"] and one._running.is_set()

    asyncio.run(main())


@pytest.mark.parametrize(("pause_mode", "rpc_timeout_s", "answers"), [("wait", 0.4, True), ("keep", 0.4, False)])
def test_an_engine_that_waits_for_requests_is_given_its_own_deadline_first(
    monkeypatch: pytest.MonkeyPatch, pause_mode: Any, rpc_timeout_s: float, answers: bool
):
    monkeypatch.setattr("skyrl_train.cluster.pool.pool.MARGIN_S", 0.1)
    late: Future[None] = Future()

    async def main() -> None:
        actor = SimpleNamespace(call=SimpleNamespace(remote=lambda method: SimpleNamespace(future=lambda: late)))
        group = engine_pool(monkeypatch, actor)
        replica = group.replicas[0]
        values = {"pause_mode": pause_mode, "rpc_timeout_s": rpc_timeout_s, "weight_sync_timeout_s": 0.1}
        replica.settings = changed(replica.settings, **values)
        said = task_error(still_running(rpc_timeout_s, ["chatcmpl-7"]))
        asyncio.get_running_loop().call_later(rpc_timeout_s, late.set_exception, said)
        expected = "requests .chatcmpl-7. still run after" if answers else "did not begin a weight update within 0.2 s"
        with pytest.raises(RemoteFailed, match=expected):
            await group.begin_weight_update()
        await asyncio.sleep(0 if answers else 0.3)

    asyncio.run(main())


def test_requests_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        engine = VllmEngine.__new__(VllmEngine)
        engine._settings = engine_settings("model", "name", "float32", 64, rpc_timeout_s=0.25, pause_mode="wait")
        engine._running = asyncio.Event()
        llm: Any = SimpleNamespace(
            errored=False,
            engine_core=SimpleNamespace(pause_scheduler_async=lambda mode, clear_cache: asyncio.sleep(30)),
            output_processor=SimpleNamespace(request_states={f"chatcmpl-{n}": None for n in range(6)}),
        )
        engine._core = Core(llm, timeout_s=60)
        with pytest.raises(TimeoutError, match=r"chatcmpl-0, .*chatcmpl-3 and 2 more.*=0.25 s.*pause_mode to keep"):
            await engine.pause()
        assert not engine._running.is_set()

    asyncio.run(main())


def test_the_time_in_which_an_engine_sleeps_is_not_its_silence(monkeypatch: pytest.MonkeyPatch):
    class Freezing(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.is_awake = asyncio.Event()

        async def _stream(self, method: str, requests: Any) -> AsyncIterator[Awaitable[Any]]:
            await self.is_awake.wait()
            for index, token_ids, _ in requests:
                yield asyncio.sleep(0, [(index, Generation(token_ids, [], "", "stop", policy_version=0))])

    async def main() -> None:
        engine = Freezing()
        pool = engine_pool(monkeypatch, engine)
        assert pool._calls.timeout_s == 0.2
        request = asyncio.ensure_future(pool.generate([1, 2], SamplingParams(8), "a"))
        await asyncio.sleep(0.02)
        await pool.sleep()
        await asyncio.sleep(0.5)
        assert not request.done()
        await pool.wake_weights()
        await pool.wake_kv_cache()
        await asyncio.sleep(0.1)
        engine.is_awake.set()
        assert (await request).token_ids == [1, 2]

    asyncio.run(main())
