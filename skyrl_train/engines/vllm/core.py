"""Calls to vLLM that end with an answer, a timeout, or an error soon after the core's death."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.engines.protocol import EngineDeadError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
POLL_S = 0.25
"""Seconds between checks that the core is alive while a call waits; vLLM itself fails the call after 6 to 11 s."""


class Core:
    def __init__(self, llm: AsyncLLM, timeout_s: float) -> None:
        """Args: timeout_s: default deadline of a call."""
        self._running_llm: AsyncLLM | None = llm
        self._timeout_s = timeout_s

    @property
    def llm(self) -> AsyncLLM:
        """Raises: EngineDeadError after `release`."""
        if self._running_llm is None:
            raise EngineDeadError("the engine was shut down")
        return self._running_llm

    def release(self) -> AsyncLLM | None:
        """Return the running vLLM, for the caller to shut down; None if it was released before."""
        llm, self._running_llm = self._running_llm, None
        return llm

    def check_alive(self, cause: BaseException | None = None) -> None:
        """Raises: EngineDeadError."""
        if self.llm.errored:
            raise EngineDeadError(
                "the vLLM engine's core process died; its last output is in this process's log"
            ) from cause

    async def pause(self, mode: str) -> None:
        """Like `AsyncLLM.pause_generation`, without the 20 ms for which that sleeps so that the last outputs probably
        reach their readers first: nothing here needs that order. Args: mode: keep, abort or wait.
        """
        await self.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def ask_workers(self, method: str, what: str, *args: Any) -> list[Any]:
        """Result of `method` on each worker."""
        return await self.call(self.llm.collective_rpc(method, args=args), what)

    async def call(self, awaitable: Awaitable[T], what: str, timeout_s: float | None = None) -> T:
        """Args: what: name of the call in errors. Raises: EngineDeadError, TimeoutError."""
        return await self.wait(awaitable, what, timeout_s or self._timeout_s)

    async def wait(self, awaitable: Awaitable[T], what: str, timeout_s: float | None) -> T:
        """Like `call`, without a deadline if timeout_s is None. vLLM never answers calls that were pending when its
        core died.
        """
        task = asyncio.ensure_future(awaitable)
        waited_s = 0.0
        try:
            while True:
                self.check_alive()
                done, _ = await asyncio.wait({task}, timeout=POLL_S)
                if done:
                    break
                waited_s += POLL_S
                if timeout_s is not None and waited_s >= timeout_s:
                    raise TimeoutError(f"the engine did not answer within {timeout_s:g} s ({what})")
            if isinstance(task.exception(), Exception) and not isinstance(task.exception(), StopAsyncIteration):
                self.check_alive(task.exception())  # report the core's death instead of vLLM's error
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
