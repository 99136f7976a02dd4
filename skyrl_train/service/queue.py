"""Jobs one at a time, in the order in which they came; one that fails is its caller's trouble alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

J = TypeVar("J")
R = TypeVar("R")


class JobFailed(RuntimeError):
    """The job had no effect; the service goes on."""


class StaleSamples(JobFailed):
    """They were drawn by other weights than those that the job would have trained; draw them again."""


class ServiceBroken(RuntimeError):
    """The service trains no more."""


class JobQueue(Generic[J, R]):
    """Runs jobs in a task of its own, so that a caller who goes away changes nothing."""

    def __init__(self, run: Callable[[J], Awaitable[R]], recover: Callable[[Exception], Awaitable[str]]) -> None:
        """Args: recover is awaited after a job that raised and before its caller hears of it; it makes good what the
        job left behind and says in words what holds now. If it raises, no job can run any more."""
        self._run, self._recover = run, recover
        self._waiting: asyncio.Queue[tuple[J, asyncio.Future[R]]] = asyncio.Queue()
        self._broken: str | None = None
        self._is_running = False
        self._task: asyncio.Task[None] | None = None

    async def submit(self, job: J) -> R:
        """As `put`, and wait."""
        return await self.put(job)

    def put(self, job: J) -> asyncio.Future[R]:
        """The job's result, when it has come to its turn and is done, or JobFailed, ServiceBroken.

        Raises: ServiceBroken.
        """
        self._refuse_if_broken()
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((job, answer))
        # Shielded: a caller's cancellation must not make the job's result an error of the worker.
        return asyncio.shield(answer)

    @property
    def broken(self) -> str | None:
        """Why no job can run any more; None while one can."""
        return self._broken

    @property
    def is_idle(self) -> bool:
        """No job runs or waits."""
        return not self._is_running and self._waiting.empty()

    async def close(self, why: str = "the service was stopped") -> None:
        """End the job in flight and refuse those that wait."""
        self._broken = self._broken or why
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refuse_waiting()

    async def _work(self) -> None:
        while True:
            self._is_running = False
            job, answer = await self._waiting.get()
            self._is_running = True
            try:
                result = await self._run(job)
            except Exception as error:
                log.exception("a job failed")
                _fail(answer, await self._after(error))
            else:
                if not answer.cancelled():
                    answer.set_result(result)
            finally:
                if not answer.done():  # cancelled in the job or in what makes it good
                    _fail(answer, ServiceBroken(self._broken or "the service was stopped"))

    async def _after(self, error: Exception) -> Exception:
        """What the caller is told."""
        reason = str(error) or type(error).__name__
        try:
            outcome = await self._recover(error)
        except Exception as second:
            log.exception("the service could not recover")
            self._broken = f"it could not recover from a failed job ({reason}): {second or type(second).__name__}"
            self._refuse_waiting()
            return ServiceBroken(self._broken)
        kind = type(error) if isinstance(error, JobFailed) else JobFailed
        failed = kind(f"{reason}; {outcome}")
        failed.__cause__ = error
        return failed

    def _refuse_waiting(self) -> None:
        while not self._waiting.empty():
            _, answer = self._waiting.get_nowait()
            _fail(answer, ServiceBroken(str(self._broken)))

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise ServiceBroken(f"the service trains no more: {self._broken}")


def _fail(answer: asyncio.Future, error: Exception) -> None:
    if not answer.cancelled():
        answer.set_exception(error)
        answer.exception()  # asked once here, or asyncio complains about callers who went away
