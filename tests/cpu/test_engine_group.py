"""How the driver waits for the engines' answers, against actors of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.engine_actor import EnginePlace, Started
from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.inference.engine import EngineDeadError
from skyrl_train.inference.router import EngineLostError
from skyrl_train.inference.settings import EngineSettings

TIMEOUT_S = 0.2


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

    remote = SimpleNamespace(remote=lambda requests: results())
    return SimpleNamespace(generate_batch=SimpleNamespace(options=lambda num_returns: remote), ping=method(ping))


async def ended(place: EnginePlace) -> None:
    """There is no process to end."""


def group_of(monkeypatch: pytest.MonkeyPatch, *actors: Any) -> EngineGroup:
    waiting = iter(actors)
    monkeypatch.setattr(EnginePlace, "new_actor", lambda place: setattr(place, "actor", next(waiting)))
    monkeypatch.setattr(EnginePlace, "end", ended)
    settings = [EngineSettings("model", "served", "float32", 64, sync_timeout_s=TIMEOUT_S) for _ in actors]
    slots: list[Any] = [None] * len(actors)
    group = EngineGroup(slots, settings, "logs", TIMEOUT_S)
    for place in group._places:
        place.started = Started(1, None, "node", ())
    return group


def answers_of(monkeypatch: pytest.MonkeyPatch, actor: Any) -> list[Any]:
    """What the driver got from the engine, deadline 0.2 s."""

    async def read() -> list[Any]:
        return [answer async for answer in group_of(monkeypatch, actor)._stream(0)([])]

    return asyncio.run(read())


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate_batch", "a stack", cause)


def test_answers_may_take_long_together(monkeypatch: pytest.MonkeyPatch):
    assert answers_of(monkeypatch, engine(0.12, 0.12, 0.12)) == [0, 1, 2]


def test_an_engine_that_lives_but_takes_too_long_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RemoteFailed, match="engine-0 finished none .* trainer.timeout_s=0.2 s: it lives.*engine-0.log"):
        answers_of(monkeypatch, engine(0.01, 30))


@pytest.mark.parametrize(
    ("actor", "reason"),
    [
        (engine(0.01, 30, ping=task_error(TimeoutError("the engine did not answer"))), "it hangs"),
        (engine(0.01, error=RayActorError()), "engine-0 died when asked to generate"),
        (engine(0.01, error=task_error(EngineDeadError("the core has ended"))), "the core has ended"),
    ],
)
def test_an_engine_that_hangs_or_dies_is_lost(monkeypatch: pytest.MonkeyPatch, actor: Any, reason: str):
    with pytest.raises(EngineLostError, match=reason):
        answers_of(monkeypatch, actor)


def test_a_request_that_an_engine_refuses_does_not_cost_the_engine(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        group = group_of(monkeypatch, engine(error=task_error(ValueError("a prompt of 99 tokens does not fit"))))
        with pytest.raises(RemoteFailed, match="99 tokens does not fit"):
            async for _ in group._stream(0)([]):
                pass
        assert list(group.actors) == ["engine-0"]

    asyncio.run(main())


def test_only_engines_that_do_not_answer_are_dropped(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        hangs, dead = None, RayActorError()
        group = group_of(monkeypatch, engine(), engine(ping=hangs), engine(), engine(ping=dead))
        before = group.membership
        assert await group.drop_lost() == ["engine-1", "engine-3"]
        assert list(group.actors) == ["engine-0", "engine-2"] and group.num_workers == 2
        assert group.membership != before, "senders must be connected anew"
        assert await group.drop_lost() == []

    asyncio.run(main())
