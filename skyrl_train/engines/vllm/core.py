"""The vLLM behind one engine: a call of it ends with an answer, at a deadline, or with the news of its core's death."""

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
"""How often a waiting call looks whether the engine's core is alive: vLLM itself tells waiters after 6 to 11 s."""


class Core:
    def __init__(self, llm: AsyncLLM, timeout_s: float) -> None:
        """Args: timeout_s is the deadline of a call that names none."""
        self._running_llm: AsyncLLM | None = llm
        self._timeout_s = timeout_s

    @property
    def llm(self) -> AsyncLLM:
        """Raises: EngineDeadError after `release`."""
        if self._running_llm is None:
            raise EngineDeadError("the engine was shut down")
        return self._running_llm

    def release(self) -> AsyncLLM | None:
        """What was running, for the caller to shut down; None if it was released before."""
        llm, self._running_llm = self._running_llm, None
        return llm

    def check_alive(self, cause: BaseException | None = None) -> None:
        """Raises: EngineDeadError."""
        if self.llm.errored:
            raise EngineDeadError(
                "the vLLM engine's core process has ended; its last lines are in the log of this process"
            ) from cause

    async def ask_workers(self, method: str, what: str, *args: Any) -> list[Any]:
        """The answer of each worker's `method`; the rest is as in `call`."""
        return await self.call(self.llm.collective_rpc(method, args=args), what)

    async def call(self, awaitable: Awaitable[T], what: str, timeout_s: float | None = None) -> T:
        """Args: what says in an error's text what was waited for.

        Raises: EngineDeadError, TimeoutError.
        """
        return await self.wait(awaitable, what, timeout_s or self._timeout_s)

    async def wait(self, awaitable: Awaitable[T], what: str, timeout_s: float | None) -> T:
        """As `call`, without a deadline where timeout_s is None: vLLM leaves calls that were pending when its core died
        without an answer."""
        task = asyncio.ensure_future(awaitable)
        waited_s = 0.0
        try:
            while True:
                self.check_alive()
                if await _wait_done(task, POLL_S):
                    break
                waited_s += POLL_S
                if timeout_s is not None and waited_s >= timeout_s:
                    raise TimeoutError(f"the engine did not answer within {timeout_s:g} s ({what})")
            if isinstance(task.exception(), Exception) and not isinstance(task.exception(), StopAsyncIteration):
                self.check_alive(task.exception())  # the death of the core, not what vLLM made of it
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _wait_done(task: asyncio.Future[Any], timeout_s: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    return bool(done)
