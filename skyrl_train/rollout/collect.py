"""Many concurrent rollouts -> Groups."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from skyrl_train.cancellation import cancel
from skyrl_train.faults import described, faults_of, is_cancellation, listed, name_of
from skyrl_train.rollout.admission import Admission, Failure
from skyrl_train.rollout.contract import Engines, Requests, Rollout, RolloutFailure
from skyrl_train.rollout.seeds import seeded
from skyrl_train.rollout.streaming.watchdog import SHOWN, no_progress, stacks, warn_of_slow
from skyrl_train.types import Group, Prompt, Sample, SamplingParams

log = logging.getLogger(__name__)

Result = list[Sample] | Failure
T = TypeVar("T")
TAIL_BEGINS = 0.9
"""Fraction of the rollouts; the others are the tail of a collection."""


class Progress(Protocol):
    """Receives rollouts as they end."""

    def start(self, total: int) -> None:
        """Before the first of `total` rollouts."""

    def advance(self, samples: Sequence[Sample]) -> None:
        """A rollout ended with these samples."""

    def stop(self) -> None:
        """After the last, or after an error."""


class Silent:
    """Progress that nobody sees, such as that of one group of a step; subclasses count it."""

    def start(self, total: int) -> None:
        pass

    def advance(self, samples: Sequence[Sample]) -> None:
        pass

    def stop(self) -> None:
        pass


class Collector:
    """Collects the samples of many prompts, all in flight at once."""

    tail_s: float = 0.0
    """Seconds of the last collection after TAIL_BEGINS of its rollouts had ended."""

    def __init__(self, rollout: Rollout, engines: Engines, deadline_s: float | None = None) -> None:
        """Args: deadline_s: seconds without the end of a rollout, a request to its engines or an environment's call
        after which `collect` fails; None: never.
        """
        self._rollout, self.engines, self.deadline_s = rollout, engines, deadline_s
        self._ended_s = 0.0
        """Time at which a rollout last ended, or a collection began."""
        self._warned_s = 0.0
        """`_ended_s` of the last warning."""

    @property
    def requests(self) -> Requests:
        return self.engines.requests

    async def collect(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling_params: SamplingParams,
        progress: Progress,
        admission: Admission,
        *,
        with_greedy: bool = False,
    ) -> list[Group]:
        """Return the groups of `n_samples` rollouts of each prompt, in the order of the prompts, without failed ones.

        Args: sampling_params: with a seed, each rollout gets one derived from it, the prompt's uid and its own index;
            with_greedy: generate another, greedy response for each prompt.
        Raises: errors of the admission and of the engines, and NoProgress; first all other rollouts are cancelled.
        """
        self._ended_s, ends = time.monotonic(), list[float]()
        params = [sampling_params] * n_samples + [replace(sampling_params, temperature=0.0)] * with_greedy
        progress.start(len(prompts) * len(params))
        try:
            results = await all_or_first_error(
                [
                    (task_name(prompt), self._timed(rollouts, ends))
                    for prompt in prompts
                    for rollouts in self._rollouts(prompt, params, progress, admission)
                ],
                None if self.deadline_s is None else self._check_progress,
            )
        finally:
            progress.stop()
        self.tail_s = ends[-1] - ends[math.ceil(TAIL_BEGINS * len(ends)) - 1] if ends else 0.0
        flat, groups = [result for made in results for result in made], []
        for i, prompt in enumerate(prompts):
            own_results = flat[i * len(params) : (i + 1) * len(params)]
            greedy = own_results.pop() if with_greedy else ()
            groups.append(admission.finish(prompt, own_results, greedy))
        return [group for group in groups if group is not None]

    def _rollouts(
        self, prompt: Prompt, params: Sequence[SamplingParams], progress: Progress, admission: Admission
    ) -> list[Coroutine[Any, Any, list[Result]]]:
        """Calls that run concurrently, and together have one result for each of `params`."""
        return [
            self._result(prompt, seeded(own, prompt.uid, index), progress, admission)
            for index, own in enumerate(params)
        ]

    async def _result(
        self, prompt: Prompt, sampling_params: SamplingParams, progress: Progress, admission: Admission
    ) -> list[Result]:
        for attempt in range(1, admission.num_attempts + 1):
            engines = self.engines.for_a_rollout(prompt)
            try:
                samples = self._samples(prompt, await self._rollout(prompt, sampling_params, engines))
                if engines.error is not None:  # own code cannot continue without its engines
                    raise engines.error
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if is_cancellation(error):
                    raise
                if engines.error is not None:
                    raise engines.error from engines.error.__cause__
                failure = Failure(prompt.name, self._named(prompt, error))
                if attempt < admission.num_attempts:
                    admission.retry(failure)
                    continue
                return [admission.fail(failure)]
            progress.advance(samples)
            return [samples]
        raise AssertionError("num_attempts is at least 1")

    def _samples(self, prompt: Prompt, made: object) -> list[Sample]:
        """What the rollout returned, as a list. Raises: RolloutFailure for anything that cannot be trained."""
        samples = [made] if isinstance(made, Sample) else made
        if not isinstance(samples, list) or not samples:
            raise self._failure(prompt, f"it returned {made!r:.200}. Return a Sample or a list of at least one")
        for number, sample in enumerate(samples):
            if faults := faults_of(sample, self.engines.vocab_size):
                which = "the sample" if len(samples) == 1 else f"sample {number} of the {len(samples)}"
                raise self._failure(prompt, f"{which} that it returned {listed(faults)}")
        if not samples[-1].ends_conversation:
            problem = "its last sample has ends_conversation=False: the next rollout would continue it"
            raise self._failure(prompt, problem)
        return samples

    def _named(self, prompt: Prompt, error: BaseException) -> RolloutFailure:
        """The error with the names of rollout and prompt, unless it has them."""
        if isinstance(error, RolloutFailure):
            return error
        failure = self._failure(prompt, described(error, __file__))
        failure.__cause__ = error
        return failure

    def _failure(self, prompt: Prompt, problem: str) -> RolloutFailure:
        return RolloutFailure(f"the rollout {name_of(self._rollout)} failed ({prompt.name}): {problem}")

    async def _timed(self, rollouts: Coroutine[Any, Any, list[Result]], ends: list[float]) -> list[Result]:
        try:
            return await rollouts
        finally:
            self._ended_s = time.monotonic()
            ends.append(self._ended_s)

    def _check_progress(self, running: Sequence[asyncio.Task[Any]]) -> float:
        """Seconds in which something has to end. Raises: NoProgress if it is too late, with stacks in the log."""
        assert self.deadline_s is not None
        since_end_s = time.monotonic() - self._ended_s
        names = list(dict.fromkeys(task.get_name() for task in running))
        if (left_s := self.deadline_s - min(since_end_s, self.requests.quiet_s)) > 0:
            if since_end_s >= self.deadline_s and self._warned_s != self._ended_s:
                self._warned_s = self._ended_s
                warn_of_slow(since_end_s, names)
            return left_s
        log.error("no rollout ends. %s", stacks(names[:SHOWN]))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        waits = f"{len(running)} rollouts run, of {', '.join(names[:SHOWN])}{more}"
        raise no_progress(self.deadline_s, self.requests, num_running=len(running), waits=waits, failures=())


def task_name(prompt: Prompt) -> str:
    """Name of the tasks in which the prompt's rollouts run."""
    return f"prompt {prompt.uid}"


async def all_or_first_error(
    calls: Sequence[tuple[str, Coroutine[Any, Any, T]]],
    check: Callable[[Sequence[asyncio.Task[T]]], float] | None = None,
) -> list[T]:
    """Unlike asyncio.TaskGroup, raise the first error itself, not an ExceptionGroup with those that followed.

    Args: calls: names and coroutines of the tasks; check: called with those that run; returns the seconds until it
        wants to be called again, or raises.
    """
    if not calls:
        return []
    tasks = [asyncio.create_task(call, name=name) for name, call in calls]
    try:
        running = set(tasks)
        while running and not any(task.cancelled() or task.exception() for task in tasks if task not in running):
            wait_s = None if check is None else check([task for task in tasks if task in running])
            _, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.cancelled():
                raise RuntimeError(
                    f"{task.get_name()}: a rollout's own code cancelled its task. Raise an error instead"
                )
        return [task.result() for task in tasks if task not in running]
    except BaseException:
        await cancel(tasks)
        raise
