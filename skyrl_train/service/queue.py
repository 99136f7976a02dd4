"""Jobs one at a time, in the order of their submission, and the metrics of those that finished."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from skyrl_train.faults import is_cancellation
from skyrl_train.service.job import Job
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)

KEPT = 10_000
"""Records of a Feed."""
STOPPED = "the service was stopped"


class JobFailed(RuntimeError):
    """The job had no effect; the service continues."""


class StaleSamples(JobFailed):
    """The samples are of another policy version than the one that would be trained. Sample again."""


class ServiceBroken(RuntimeError):
    """The service can no longer train."""


class JobQueue:
    """Runs jobs in its own task, so that a client that disconnects changes nothing."""

    def __init__(
        self, run: Callable[[Job], Awaitable[Metrics]], recover: Callable[[BaseException], Awaitable[str]]
    ) -> None:
        """Args: recover: awaited after a job that raised, before its client gets the error; it restores the service and
        returns a report for the error. If it raises, no job can run any more.
        """
        self._run, self._recover = run, recover
        self._waiting: asyncio.Queue[tuple[Job, asyncio.Future[Metrics]]] = asyncio.Queue()
        self.broken: str | None = None
        """Reason why no job can run any more."""
        self._is_running = False
        self._task: asyncio.Task[None] | None = None

    def submit(self, job: Job) -> asyncio.Future[Metrics]:
        """Returns: the job's result once it is done, or JobFailed, ServiceBroken. Raises: ServiceBroken."""
        if self.broken is not None:
            raise ServiceBroken(f"the service can no longer train: {self.broken}")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        answer: asyncio.Future[Metrics] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((job, answer))
        # Shielded: a caller's cancellation must not make the job's result an error of the worker.
        return asyncio.shield(answer)

    @property
    def is_idle(self) -> bool:
        return not self._is_running and self._waiting.empty()

    async def close(self) -> None:
        """Abort the current job and reject those that wait."""
        self.broken = self.broken or STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._reject_waiting()

    async def _work(self) -> None:
        while True:
            self._is_running = False
            job, answer = await self._waiting.get()
            self._is_running = True
            try:
                result = await self._run(job)
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # own code may raise the last two
                if is_cancellation(error):
                    raise
                log.exception("a job failed")
                _fail(answer, await self._after(error))
            else:
                if not answer.cancelled():
                    answer.set_result(result)
            finally:
                if not answer.done():  # cancelled in the job or its recovery
                    _fail(answer, ServiceBroken(self.broken or STOPPED))

    async def _after(self, error: BaseException) -> Exception:
        """Recover, and return the error for the client."""
        reason = str(error) or type(error).__name__
        try:
            report = await self._recover(error)
        except (Exception, SystemExit, asyncio.CancelledError) as second:
            if is_cancellation(second):
                raise
            log.exception("the service could not recover")
            self.broken = f"it could not recover from a failed job ({reason}): {second or type(second).__name__}"
            self._reject_waiting()
            return ServiceBroken(self.broken)
        kind = type(error) if isinstance(error, JobFailed) else JobFailed
        failed = kind(f"{reason}; {report}")
        failed.__cause__ = error
        return failed

    def _reject_waiting(self) -> None:
        while not self._waiting.empty():
            _, answer = self._waiting.get_nowait()
            _fail(answer, ServiceBroken(str(self.broken)))


def _fail(answer: asyncio.Future, error: Exception) -> None:
    if not answer.cancelled():
        answer.set_exception(error)
        answer.exception()  # else asyncio logs errors whose client has disconnected as never retrieved


class Feed:
    """Metrics of finished jobs for any number of readers, numbered from 1; the last KEPT are kept."""

    def __init__(self) -> None:
        self._records: deque[Metrics] = deque(maxlen=KEPT)
        self.last = 0
        """Number of the newest record, 0 before the first."""
        self._more = asyncio.Event()

    def add(self, record: Metrics) -> None:
        self._records.append(record)
        self.last += 1
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, number: int, timeout_s: float) -> tuple[int, list[Metrics]]:
        """(number of the last of the records, records after `number`); none if none comes in time."""
        more = self._more
        if self.last <= number:
            try:
                await asyncio.wait_for(more.wait(), timeout_s)
            except TimeoutError:
                return number, []  # a record may have come since
        num_passed = number + len(self._records) - self.last
        return self.last, list(self._records)[max(0, num_passed) :]
