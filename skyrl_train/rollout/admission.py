"""Admission of finished rollouts: a group to train on, or a failure with its reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.rollout.contract import RolloutFailure
from skyrl_train.types import Group, Metrics, Prompt, Sample

log = logging.getLogger(__name__)

SHOWN_REASONS = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that ended without a sample."""

    prompt: str
    """`Prompt.name`"""
    error: Exception

    def __str__(self) -> str:
        if isinstance(self.error, RolloutFailure):
            return str(self.error)
        return f"{self.prompt}: {type(self.error).__name__}: {self.error}"


class TooManyFailures(RuntimeError):
    """More rollouts failed than generator.max_failed_share allows."""


@dataclass(slots=True)
class Ledger:
    """Groups of a source by outcome."""

    generated: int = 0
    """Number of groups that ended, including cancelled ones."""
    waiting: int = 0
    trained: int = 0
    """Given to the training step."""
    filtered: int = 0
    """Complete, and excluded on purpose."""
    failed: int = 0
    cancelled: int = 0
    """Groups that their step did not need; their rows start again."""

    def check(self) -> None:
        """Raises: RuntimeError unless every group has exactly one outcome."""
        if min(self.waiting, self.trained) < 0 or (
            self.generated != self.trained + self.filtered + self.failed + self.cancelled + self.waiting
        ):
            raise RuntimeError(f"groups were lost or counted twice: {self}. This is a bug in their source")

    def train(self, num_groups: int) -> None:
        """Count waiting groups as trained; a negative number takes that back. Raises: like `check`."""
        self.waiting -= num_groups
        self.trained += num_groups
        self.check()

    def leave_out(self, num_groups: int) -> None:
        """Count waiting groups as filtered. Raises: like `check`."""
        self.waiting -= num_groups
        self.filtered += num_groups
        self.check()

    def cancel(self, *, num_complete: int, num_running: int) -> None:
        """Count waiting groups, and others that were not generated to their end, as cancelled. Raises: like `check`."""
        self.waiting -= num_complete
        self.generated += num_running
        self.cancelled += num_complete + num_running
        self.check()


class Admission:
    """Decides about the finished rollouts of one source.

    A failed rollout is left out of its group. With fewer than two samples left (one, in groups of one) the group fails
    and the source replaces it.
    """

    def __init__(
        self,
        max_failed_share: float,
        *,
        filters: bool = False,
        max_filtered: int | None = None,
        num_attempts: int = 1,
        cancels: bool = False,
        min_samples: int = 2,
    ) -> None:
        """Args:
        max_failed_share: fraction of a step's rollouts that may fail.
        filters: whether the source excludes complete groups, which are then counted in the metrics.
        max_filtered: number of these groups in a step at which `filter` gives up; None: no limit.
        num_attempts: how often a rollout is tried before it counts as failed.
        cancels: whether the source cancels groups, which are then counted in the metrics.
        min_samples: those that must be left of a group of more.
        """
        self.ledger = Ledger()
        self._max_failed_share, self.num_attempts = max_failed_share, num_attempts
        self._filters, self._max_filtered, self._cancels = filters, max_filtered, cancels
        self._min_samples = min_samples
        self.begin(0)

    @property
    def failures(self) -> Sequence[Failure]:
        return self._failures

    def begin(self, num_rollouts: int) -> None:
        """Begin a step of `num_rollouts` rollouts, and count failures from 0."""
        self._num_rollouts = num_rollouts
        self._failures: list[Failure] = []
        self._num_failed_groups = self._num_filtered = self._num_retried = self._num_cancelled = 0

    def filter(self, num_groups: int) -> None:
        """Count complete groups that are left out for lack of signal. Raises: RuntimeError at the limit of a step."""
        self._num_filtered += num_groups
        self.ledger.leave_out(num_groups)
        if num_groups and self._max_filtered is not None and self._num_filtered >= self._max_filtered:
            raise RuntimeError(
                f"{self._num_filtered} groups whose samples have equal rewards were left out since the last step, as "
                "many as trainer.algorithm.dynamic_sampling.max_sample_batches allows. Raise it (-1: no limit), use "
                "easier or harder prompts, or set trainer.algorithm.dynamic_sampling.type=null"
            )

    def cancel(self, *, num_complete: int, num_running: int) -> None:
        """Count groups that the step does not need: complete ones, and others whose rollouts were cancelled."""
        self._num_cancelled += num_complete + num_running
        self.ledger.cancel(num_complete=num_complete, num_running=num_running)

    def retry(self, failure: Failure) -> None:
        """Count a failed attempt that is repeated."""
        self._num_retried += 1
        log.warning("a rollout failed and is repeated: %s", failure)

    def fail(self, failure: Failure) -> Failure:
        """Count a failed rollout. Raises: its own error if none may fail, or TooManyFailures past the limit."""
        self._failures.append(failure)
        if len(self._failures) <= self._max_failed_share * self._num_rollouts:
            log.warning("a rollout failed (%d in this step): %s", len(self._failures), failure)
            return failure
        if self._max_failed_share == 0:
            raise failure.error
        reasons = "; ".join(str(other) for other in self._failures[-SHOWN_REASONS:])
        raise TooManyFailures(
            f"generator.max_failed_share is {self._max_failed_share:g}: {len(self._failures)} of "
            f"{self._num_rollouts} rollouts of the step failed. The last ones: {reasons}"
        ) from failure.error

    def finish(
        self, prompt: Prompt, results: Sequence[Sequence[Sample] | Failure], greedy: Sequence[Sample] | Failure = ()
    ) -> Group | None:
        """The group of a prompt whose rollouts have ended, counted as waiting; None if it has failed."""
        made = [samples for samples in results if not isinstance(samples, Failure)]
        self.ledger.generated += 1
        if len(made) < min(self._min_samples, len(results)) or isinstance(greedy, Failure):
            self.ledger.failed += 1
            self._num_failed_groups += 1
            return None
        self.ledger.waiting += 1
        return Group(prompt, tuple(sample for samples in made for sample in samples), tuple(greedy))

    def metrics(self) -> Metrics:
        """Numbers of failed rollouts, filtered and cancelled groups of the step, if there may be any."""
        metrics = {"generate/num_filtered_groups": float(self._num_filtered)} if self._filters else {}
        if self._cancels:
            metrics["generate/num_cancelled_groups"] = float(self._num_cancelled)
        if self._max_failed_share:
            metrics["generate/num_failed_rollouts"] = float(len(self._failures))
            metrics["generate/num_failed_groups"] = float(self._num_failed_groups)
        if self.num_attempts > 1:
            metrics["generate/num_retried_rollouts"] = float(self._num_retried)
        return metrics
