"""An engine closes an update as soon as it has loaded the weights of every sender, and reports what happened then."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from skyrl_train.engines.vllm.core import Core
from skyrl_train.engines.vllm.weights import Weights
from skyrl_train.weight_sync.control import WeightSyncError

CLOSED = ["finish", "skyrl_sync_report", "reset"]


class RecordingLlm:
    """vLLM's front end as `Weights` uses it, without a model. The core behind it does one thing after another."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.load_error: Exception | None = None
        self.close_error: Exception | None = None
        self.seconds = 0.0
        """Of loading and of closing."""
        self._core = asyncio.Lock()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(f"join {request.init_info['info']['sender']}")

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        async with self._core:
            await asyncio.sleep(self.seconds)
        if self.load_error is not None:
            raise self.load_error
        self.calls.append(f"load {request.update_info['message']['sender']}")

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")
        async with self._core:
            await asyncio.sleep(self.seconds)
        if self.close_error is not None:
            raise self.close_error

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    async def collective_rpc(self, method: str, args: Any) -> list[dict[str, Any]]:
        self.calls.append(method)
        return [{"digests": {"a": 1}, "faults": []}]


class Engine:
    def __init__(self, *senders: str, timeout_s: float = 10.0) -> None:
        self.llm = RecordingLlm()
        self.weights = Weights(Core(self.llm, timeout_s), "policy", None)  # type: ignore[arg-type]
        self.senders = senders

    async def connect(self) -> None:
        for sender in self.senders:
            await self.weights.connect({"sender": sender})

    async def begin(self) -> None:
        await self.connect()
        await self.weights.start()

    async def load(self, *senders: str) -> None:
        for sender in senders:
            await self.weights.load({"sender": sender})

    async def seen(self) -> list[str]:
        """Calls since the last time, after those that are under way."""
        for _ in range(10):
            await asyncio.sleep(0)
        found, self.llm.calls[:] = [*self.llm.calls], []
        return found

    async def finish(self, digest: int = 1) -> None:
        await self.weights.finish(1, {"a": digest})
        self.weights.are_complete = True


def test_an_update_is_closed_when_all_senders_have_sent_and_before_the_driver_asks():
    async def run() -> None:
        engine = Engine("one", "two")
        await engine.connect()
        for _ in range(2):
            await engine.seen()
            await engine.weights.start()
            await engine.load("one")
            assert await engine.seen() == ["start", "load one"]
            await engine.load("two")
            assert await engine.seen() == ["load two", *CLOSED]
            await engine.finish()
            assert await engine.seen() == []

    asyncio.run(run())


def test_an_update_that_lacks_a_sender_is_closed_when_the_driver_asks():
    async def run() -> None:
        engine = Engine("one", "two")
        await engine.begin()
        await engine.load("one")
        await engine.seen()
        with pytest.raises(WeightSyncError, match="weights differ"):
            await engine.finish(digest=2)
        assert await engine.seen() == CLOSED

    asyncio.run(run())


def test_after_a_failed_update_only_senders_that_join_again_are_expected():
    async def run() -> None:
        engine = Engine("one", "two")
        await engine.begin()
        engine.llm.load_error = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            await engine.load("one")
        assert "finish" not in await engine.seen()
        engine.llm.load_error, engine.senders = None, ("three",)
        await engine.begin()
        assert "skyrl_close_update" in await engine.seen()
        await engine.load("three")
        assert await engine.seen() == ["load three", *CLOSED]
        await engine.finish()

    asyncio.run(run())


def test_a_close_that_fails_is_reported_when_the_driver_asks(caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        engine = Engine("one")
        await engine.begin()
        engine.llm.close_error = RuntimeError("cannot close")
        await engine.load("one")
        await engine.seen()
        with pytest.raises(RuntimeError, match="cannot close"):
            await engine.finish()
        await engine.weights.start()
        await engine.load("one")
        await engine.seen()  # and nobody asks

    asyncio.run(run())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_loading_and_closing_have_a_deadline_each():
    async def run() -> None:
        engine = Engine("one", timeout_s=1.0)
        engine.llm.seconds = 0.7
        await engine.begin()
        await engine.load("one")
        await engine.finish()

    asyncio.run(run())
