"""Work beside the driver's calls."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from skyrl_train.cluster.background import Background


def test_what_is_not_done_is_cancelled_and_has_ended():
    ended: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def main() -> None:
        background = Background()
        done = background.begin(work("done", 0))
        await done
        waiting = background.begin(work("waiting", 60))
        await asyncio.sleep(0)
        await background.end()
        assert ended == ["done", "waiting"] and waiting.cancelled() and not done.cancelled()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_an_error_that_nobody_asks_for_is_no_complaint_of_asyncio():
    complaints: list[Any] = []

    async def fail() -> None:
        raise RuntimeError("no room")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        Background().begin(fail())
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    assert complaints == []
