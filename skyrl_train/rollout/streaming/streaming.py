"""The source of asynchronous training: rollouts run all the time, also while the policy is updated."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from skyrl_train.cancellation import cancel
from skyrl_train.data.order import Order, row_of
from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.collect import Silent, task_name
from skyrl_train.rollout.source import SourceParts, SourceState
from skyrl_train.rollout.streaming.buffer import Buffer, Finished, Ticket
from skyrl_train.rollout.streaming.measures import StreamMetrics
from skyrl_train.rollout.streaming.saved_groups import SavedGroup, from_bytes, to_bytes
from skyrl_train.rollout.streaming.watchdog import SHOWN, NoProgress, deadline_s, no_progress, stacks, warn_of_slow
from skyrl_train.types import Group, Metrics, Prompt, Sample

log = logging.getLogger(__name__)

NUM_ATTEMPTS = 2
"""A failed rollout is repeated once, in a new environment and with the same seed."""


@dataclass(slots=True)
class _Running(Silent):
    """A group that is generated or waits, and the progress of its rollouts, which counts for the whole step."""

    prompt: Prompt
    epoch: int
    advanced: Callable[[Sequence[Sample]], None]
    num_ended: int = 0
    task: asyncio.Task[None] | None = None

    def advance(self, samples: Sequence[Sample]) -> None:
        self.num_ended += 1
        self.advanced(samples)


class StreamingSource:
    """Groups of which no token is more than `trainer.max_staleness` steps old when it is trained.

    Rollouts run in tasks, one per group, and continue while the policy is updated and while the engines receive its
    weights. Their errors are raised by `next`.
    """

    def __init__(self, parts: SourceParts) -> None:
        trainer, generator = parts.config.trainer, parts.config.generator
        self._parts, self._size, self._n_samples = parts, trainer.train_batch_size, generator.n_samples_per_prompt
        self._bound, self._depth = trainer.staleness, trainer.depth
        self._order = Order(parts.prompts, batch_size=self._size, seed=trainer.seed)
        self._admission = parts.admission(self._size, num_attempts=NUM_ATTEMPTS)
        self._admission.begin(self._size * self._n_samples)
        self._buffer = self._new_buffer(0)
        self._rows: deque[tuple[Prompt, int]] = deque()
        """Rows, and their epochs, that wait to be started."""
        self._groups: dict[int, _Running] = {}
        """Ticket number -> an untrained group."""
        self._changed = asyncio.Event()
        """A rollout or a group has ended since it was cleared."""
        self._batch: list[tuple[Finished[Group], _Running]] = []
        """The groups that `next` returned last."""
        self._error: BaseException | None = None
        self._trainer_has_devices = False
        """Whether the trainer uses the engines' devices, where rollouts are frozen."""
        self._metrics = StreamMetrics()
        self._deadline_s = deadline_s(parts.config, NUM_ATTEMPTS)
        self._warn_if_engines_queue()

    async def next(self) -> list[Group]:
        """Return the oldest finished groups once the remaining ones can still meet the staleness bound. Failed and
        filtered groups are replaced.

        Raises: like `Collector`, for any rollout since the last call; NoProgress.
        """
        self._raise_error()
        self._buffer.end_step()
        self._batch = []
        self._metrics.steps[self._parts.policy_version()] = self._buffer.step
        with self._parts.timers("sync_weights"):
            await self._parts.wake_engines()
        self._trainer_has_devices = False
        started_s = self._metrics.clock()
        with self._parts.timers("wait_for_groups"):
            self._fill()
            batch = await self._finished_batch()
        self._trainer_has_devices = self._parts.config.trainer.placement.takes_turns
        self._note_running()
        self._metrics.take(batch, self._buffer, self._metrics.clock() - started_s)
        self._batch = [(finished, self._groups.pop(finished.ticket.number)) for finished in batch]
        epoch = max(group.epoch for _, group in self._batch)
        self._admission.ledger.train(len(batch))
        self._metrics.values |= {"trainer/epoch": float(epoch)} | self._admission.metrics()
        self._admission.begin(self._size * self._n_samples)
        return [finished.item for finished in batch]

    def roll_back(self) -> None:
        """The groups last returned by `next` were not trained: they are finished ones again, for a `snapshot`."""
        self._buffer.roll_back([finished for finished, _ in self._batch])
        self._groups |= {finished.ticket.number: group for finished, group in self._batch}
        self._admission.ledger.train(-len(self._batch))
        self._batch = []

    def metrics(self) -> Metrics:
        return self._metrics.values

    @property
    def state(self) -> SourceState:
        """The order, the next step, the ledger, and the rows of groups that were started and not trained."""
        return self._state(self._buffer.untrained)

    def snapshot(self) -> tuple[SourceState, bytes]:
        """`state` without the rows of finished groups, and these groups as bytes, for `restore`."""
        ready = [self._buffer.ready[number] for number in sorted(self._buffer.ready)]
        if not ready:
            return self.state, b""
        groups = [SavedGroup(f.item, self._groups[f.ticket.number].epoch, f.ticket.step, f.step) for f in ready]
        try:
            data = to_bytes(groups)
        except TypeError as error:
            log.warning("finished groups are not in the checkpoint, a resumed run generates them again: %s", error)
            return self.state, b""
        versions = {version for saved in groups for s in saved.group.samples for version, _ in s.known_spans}
        steps = [[version, step] for version, step in self._metrics.steps.items() if version in versions]
        running = sorted(self._buffer.running.values(), key=lambda ticket: ticket.number)
        return self._state(running) | {"steps": steps, "policy_version": self._parts.policy_version()}, data

    def _state(self, tickets: Sequence[Ticket]) -> SourceState:
        waiting = [self._groups[ticket.number] for ticket in tickets]
        rows = [(group.prompt, group.epoch) for group in waiting] + list(self._rows)
        return {
            "order": self._order.state,
            "step": self._buffer.step + (self._buffer.num_in_training > 0),
            "pending": [[prompt.uid, epoch] for prompt, epoch in rows],
            "ledger": asdict(self._admission.ledger),
        }

    def resume(self, state: SourceState) -> None:
        """Start the rows of the state again, before new ones.

        Raises: ValueError for the state of another source, or of other rows.
        """
        self.restore(state, b"")

    def restore(self, state: SourceState, data: bytes) -> None:
        """Continue after a `snapshot`: its finished groups are trained first, and its rows start again.

        Raises: like `resume`; ValueError for groups that cannot be read.
        """
        self._order.resume(state.get("order", {}))
        rows = {prompt.uid: prompt for prompt in self._parts.prompts}
        self._buffer = self._new_buffer(state["step"])
        pending = [(row_of(rows, uid), epoch) for uid, epoch in state["pending"]]
        self._rows.extend(self._restore_groups(state, data, rows) + pending if data else pending)
        done = {name: count for name, count in state.get("ledger", {}).items() if name not in ("generated", "waiting")}
        num_ready = len(self._buffer.ready)
        self._admission.ledger = Ledger(sum(done.values()) + num_ready, num_ready, **done)
        self._admission.ledger.check()

    def _restore_groups(self, state: SourceState, data: bytes, rows: dict[str, Prompt]) -> list[tuple[Prompt, int]]:
        """Put finished groups into the buffer; return the rows of those that are too old for the bound, or lack the
        greedy response that the estimator now needs. Raises: ValueError.
        """
        newer = self._parts.policy_version() - state["policy_version"]
        self._metrics.steps |= {version + newer: step for version, step in state["steps"]}
        saved, again = list[SavedGroup](), list[tuple[Prompt, int]]()
        for each in from_bytes(data, rows, newer):
            if each.group.greedy or not self._parts.with_greedy:
                saved.append(each)
            else:
                again.append((each.group.prompt, each.epoch))
        if again:
            log.warning(
                "%d finished groups of the checkpoint lack a greedy response and are generated again", len(again)
            )
        left_out = self._buffer.restore([(each.started, each.finished, each.group) for each in saved])
        if left_out:
            log.warning(
                "%d finished groups of the checkpoint are too old for trainer.max_staleness=%d and are generated again",
                left_out,
                self._bound,
            )
        for number, each in enumerate(saved[left_out:]):
            self._groups[number] = _Running(each.group.prompt, each.epoch, self._note_end)
        return again + [(each.group.prompt, each.epoch) for each in saved[:left_out]]

    async def close(self) -> None:
        tasks = [group.task for group in self._groups.values() if group.task is not None]
        self._error = self._error or RuntimeError("the source of groups was closed")
        await cancel(tasks)

    def _new_buffer(self, step: int) -> Buffer[Group]:
        return Buffer(self._size, self._bound, self._depth, step=step, num_steps=self._parts.num_steps)

    def _warn_if_engines_queue(self) -> None:
        generator = self._parts.config.generator
        samples = self._parts.config.trainer.groups_in_flight * self._n_samples
        room = generator.num_rollout_engines * generator.step_sequences
        if samples > 2 * room:
            log.warning(
                "%d samples may be in flight, and the engines generate %d at a time (generator.num_inference_engines * "
                "max_num_seqs): the others become stale while they wait. Lower trainer.pipeline_depth or "
                "trainer.train_batch_size, or add engines",
                samples,
                room,
            )

    def _fill(self) -> None:
        while capacity := self._buffer.capacity:
            if not self._rows:
                rows = self._order.next_rows(min(capacity, self._size))
                self._rows.extend((row, self._order.epoch) for row in rows)
            ticket = self._buffer.submit()
            group = self._groups[ticket.number] = _Running(*self._rows.popleft(), self._note_end)
            group.task = asyncio.get_running_loop().create_task(self._generate(ticket, group))
            group.task.add_done_callback(self._note_error)
        self._note_running()

    def _note_running(self) -> None:
        self._metrics.note_running(0 if self._trainer_has_devices else len(self._buffer.running))

    async def _generate(self, ticket: Ticket, group: _Running) -> None:
        made = await self._parts.group(group.prompt, group.epoch, self._admission, group)
        group.task = None
        if made is not None:
            self._buffer.finish(ticket, made)
        else:
            self._buffer.drop(ticket)
            del self._groups[ticket.number]
        self._admission.ledger.check()
        self._fill()
        self._changed.set()

    async def _finished_batch(self) -> list[Finished[Group]]:
        """Raises: like `next`."""
        missing = self._size - len(self._buffer.ready)
        self._parts.progress.start(max(0, missing) * self._n_samples)
        wait_s = self._deadline_s
        try:
            while True:
                self._changed.clear()
                self._raise_error()
                if (batch := self._buffer.take()) is not None:
                    return batch
                try:
                    await asyncio.wait_for(self._changed.wait(), wait_s)
                    wait_s = self._deadline_s
                except TimeoutError:
                    wait_s = self._deadline_s - self._parts.collector.requests.quiet_s
                    if wait_s <= 0:
                        raise self._no_progress() from None
                    warn_of_slow(self._deadline_s, [task_name(group.prompt) for _, group in self._awaited])
        finally:
            self._parts.progress.stop()

    @property
    def _awaited(self) -> list[tuple[Ticket, _Running]]:
        """What the step waits for."""
        return [(ticket, self._groups[ticket.number]) for ticket in self._buffer.awaited]

    def _no_progress(self) -> NoProgress:
        """Names what the step waits for and why; the stacks of these rollouts go to the log."""
        awaited = self._awaited
        log.error("no rollout ends. %s", stacks(task_name(group.prompt) for _, group in awaited[:SHOWN]))
        shown = ", ".join(
            f"{group.prompt.name} ({group.num_ended} of {self._n_samples} rollouts ended, started in step "
            f"{ticket.step + 1})"
            for ticket, group in awaited[:SHOWN]
        )
        more = f" and {len(awaited) - SHOWN} more" if len(awaited) > SHOWN else ""
        num_running, num_ready = len(self._buffer.running), len(self._buffer.ready)
        return no_progress(
            self._deadline_s,
            self._parts.collector.requests,
            num_running=num_running,
            waits=f"Step {self._buffer.step + 1} waits for {shown}{more}; {num_running} groups run and {num_ready} are "
            "ready",
            failures=[str(failure) for failure in self._admission.failures],
        )

    def _note_end(self, samples: Sequence[Sample]) -> None:
        self._parts.progress.advance(samples)
        self._changed.set()

    def _note_error(self, task: asyncio.Task[None]) -> None:
        """Keep the first error for `next`, and cancel the other rollouts."""
        if self._error is not None or task.cancelled() or task.exception() is None:
            return
        self._error = task.exception()
        self._changed.set()
        for group in self._groups.values():
            if group.task is not None:
                group.task.cancel()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
