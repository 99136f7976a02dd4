"""Oversampling: a step starts more prompts than it trains, and takes the first complete groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.cancellation import cancel, has_result
from skyrl_train.data.order import Order, row_of
from skyrl_train.rollout.collect import Progress, Silent
from skyrl_train.rollout.source import GroupSource, OnPolicySource, SourceParts, SourceState
from skyrl_train.types import Group, Metrics, Prompt, Sample

MAX_CANCELLED = 2
"""Number of cancellations after which a step waits for a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the training data on its way to a step."""

    prompt: Prompt
    epoch: int
    num_cancelled: int = 0
    """Steps that ended without its group."""

    @property
    def is_due(self) -> bool:
        return self.num_cancelled >= MAX_CANCELLED


class OverSamplingSource:
    """Keeps `trainer.over_sampling_batch_size` groups in generation or complete, and ends a step with the first
    `train_batch_size` complete ones.

    The rest is aborted, or dropped if complete (the next step has other weights). These rows start first in the next
    step, with the same seeds, and a step does not end before those that were cancelled MAX_CANCELLED times: every row
    of an epoch is trained, at most MAX_CANCELLED steps late, or later if more are due than a step trains. Which groups
    are complete first depends on time, so steps are not reproducible.
    """

    def __init__(self, parts: SourceParts) -> None:
        trainer, generator = parts.config.trainer, parts.config.generator
        assert trainer.over_sampling_batch_size is not None
        self._parts = parts
        self._size, self._num_started = trainer.train_batch_size, trainer.over_sampling_batch_size
        self._n_samples = generator.n_samples_per_prompt
        self._order = Order(parts.prompts, batch_size=self._size, seed=trainer.seed)
        self._admission = parts.admission(self._num_started, cancels=True)
        self._waiting: deque[Row] = deque()
        """Cancelled rows, the longest cancelled first."""
        self._epoch = 0

    async def next(self) -> list[Group]:
        """The first complete groups, in the order in which they were started.

        Raises: like `Collector`; RuntimeError if dynamic sampling does not find enough groups.
        """
        self._admission.begin(self._num_started * self._n_samples)
        with self._parts.timers("sync_weights"):
            await self._parts.wake_engines()
        self._parts.progress.start(self._size * self._n_samples)
        try:
            with self._parts.timers("generate"):
                chosen = await self._race()
        finally:
            self._parts.progress.stop()
        self._admission.ledger.train(len(chosen))
        self._epoch = max(row.epoch for row, _ in chosen)
        return [group for _, group in chosen]

    def metrics(self) -> Metrics:
        return {"trainer/epoch": float(self._epoch)} | self._admission.metrics()

    @property
    def state(self) -> SourceState:
        """The order, and the cancelled rows."""
        cancelled = [[row.prompt.uid, row.epoch, row.num_cancelled] for row in self._waiting]
        return {"order": self._order.state, "cancelled": cancelled}

    def resume(self, state: SourceState) -> None:
        """Continue after a state of this source or OnPolicySource. Raises: ValueError for a state of another source or
        of other rows.
        """
        self._order.resume(state.get("order", state))
        self._epoch = self._order.epoch
        rows = {prompt.uid: prompt for prompt in self._parts.prompts}
        self._waiting.extend(Row(row_of(rows, uid), epoch, number) for uid, epoch, number in state.get("cancelled", []))

    async def _race(self) -> list[tuple[Row, Group]]:
        """The rows and groups of the step, as started; the other rows wait again."""
        started: list[Row] = []
        running: dict[asyncio.Task[Group | None], int] = {}
        """Task -> index in `started`."""
        due: set[int] = set()
        """Indices of the rows that this step must not cancel again, those that have waited longest."""
        complete: dict[int, Group] = {}
        """Index in `started` -> group, as completed."""
        try:
            while len(complete) < self._size or due.intersection(running.values()):
                while len(complete) < self._size and len(running) + len(complete) < self._num_started:
                    row = self._next_row()
                    group = self._parts.group(row.prompt, row.epoch, self._admission, _Part(self._parts.progress))
                    running[asyncio.ensure_future(group)] = len(started)
                    if row.is_due and len(due) < self._size:
                        due.add(len(started))
                    started.append(row)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    if (made := task.result()) is not None:
                        complete[running[task]] = made
                    del running[task]
        finally:
            await cancel(running)
        ends = {index: task.result() for task, index in running.items() if has_result(task)}
        complete |= {index: group for index, group in ends.items() if group is not None}  # despite the cancellation
        cancelled = set(running.values()) - ends.keys()
        chosen = sorted(sorted(complete, key=lambda index: index not in due)[: self._size])
        others = sorted(cancelled | complete.keys() - {*chosen})
        self._waiting.extend(
            replace(started[index], num_cancelled=started[index].num_cancelled + 1) for index in others
        )
        self._admission.cancel(num_complete=len(complete) - len(chosen), num_running=len(cancelled))
        return [(started[index], complete[index]) for index in chosen]

    def _next_row(self) -> Row:
        if self._waiting:
            return self._waiting.popleft()
        (prompt,) = self._order.next_rows(1)
        return Row(prompt, self._order.epoch)


@dataclass(frozen=True, slots=True)
class _Part(Silent):
    """The progress of a step, for one of its groups."""

    whole: Progress

    def advance(self, samples: Sequence[Sample]) -> None:
        self.whole.advance(samples)


def on_policy_source(parts: SourceParts) -> GroupSource:
    """The source of `trainer.source=on_policy`."""
    oversamples = parts.config.trainer.over_sampling_batch_size is not None
    return OverSamplingSource(parts) if oversamples else OnPolicySource(parts)
