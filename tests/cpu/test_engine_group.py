"""How the driver waits for the engines' answers, against actors of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.engine_group import EngineGroup


def answers_of(*pauses_s: float) -> list[Any]:
    """What the driver got from an engine that answers after each of these pauses, deadline 0.2 s."""

    async def results() -> AsyncIterator[Awaitable[Any]]:
        for number, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)
            yield asyncio.sleep(0, number)

    group = EngineGroup.__new__(EngineGroup)
    remote = SimpleNamespace(remote=lambda requests: results())
    engine: Any = SimpleNamespace(generate_batch=SimpleNamespace(options=lambda num_returns: remote))
    group.actors, group._calls = [engine], Calls(("engine-0",), 0.2, "logs")

    async def read() -> list[Any]:
        return [answer async for answer in group._stream(0)([])]

    return asyncio.run(read())


def test_answers_may_take_long_together():
    assert answers_of(0.12, 0.12, 0.12) == [0, 1, 2]


def test_an_engine_that_hangs_is_named_at_the_deadline():
    with pytest.raises(RemoteFailed, match="engine-0 finished none .* trainer.timeout_s=0.2 s.*logs/engine-0.log"):
        answers_of(0.01, 30)
