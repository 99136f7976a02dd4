"""Groups between their start and their training: which may start, and which are trained next.

No clock, I/O or tasks: a plain object that tests drive by hand. A *ticket* is the right to generate one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One group, in the order in which groups start."""

    number: int
    step: int
    """Step that was next, or in training, when the group started; its tokens are of the weights before that step, or
    newer."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[Item]):
    """A group of the batch to train."""

    ticket: Ticket
    item: Item
    step: int
    """`Ticket.step` of a group that would have started when this one was finished."""


@dataclass(slots=True)
class Buffer(Generic[Item]):
    """Admits groups so that each is trained at most `max_staleness` steps after its start, and no step waits forever.

    Admission: in training + ready + running < (depth + 1) * size. A batch is the `size` oldest ready groups, and is
    complete when what is left can be trained in time: of the unfinished and ready groups left after step s, for each j
    from 0 to max_staleness at most j * size started at step s - max_staleness + j or before. j = 0 waits for the groups
    that are due now; the others keep more than `size` groups from being due together, which would break the bound or
    stop the run. Nothing is discarded.
    """

    size: int
    """Groups of a step."""
    max_staleness: int
    depth: int
    """Batches that are generated ahead, at most max_staleness."""
    step: int = 0
    """The next step, or the one in training."""
    num_steps: int | None = None
    """Steps of the run, after which no group starts; None: no limit."""
    num_in_training: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    """Ticket number -> ticket of a group that is being generated."""
    ready: dict[int, Finished[Item]] = field(default_factory=dict)
    _next_number: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.depth <= self.max_staleness:
            raise ValueError(
                f"a buffer of {self.size} groups per step, depth {self.depth} and max_staleness {self.max_staleness} "
                "cannot fill a step: it needs size > 0 and 0 <= depth <= max_staleness"
            )

    @property
    def capacity(self) -> int:
        """Groups that may start now."""
        untrained = len(self.running) + len(self.ready)
        free = (self.depth + 1) * self.size - self.num_in_training - untrained
        if self.num_steps is not None:
            left = (self.num_steps - self.step) * self.size - self.num_in_training - untrained
            free = min(free, left)
        return max(0, free)

    def submit(self) -> Ticket:
        assert self.capacity > 0, "no group may start now"
        ticket = Ticket(self._next_number, self.step)
        self._next_number += 1
        self.running[ticket.number] = ticket
        return ticket

    def finish(self, ticket: Ticket, item: Item) -> None:
        """The group is ready to train."""
        del self.running[ticket.number]
        self.ready[ticket.number] = Finished(ticket, item, self.step)

    def drop(self, ticket: Ticket) -> None:
        """The group failed or was filtered; another may start."""
        del self.running[ticket.number]

    def take(self) -> list[Finished[Item]] | None:
        """The groups of `step` in the order of their tickets, which are then in training; None while it must wait."""
        assert self.num_in_training == 0, "the last step has not ended"
        chosen = [self.ready[number] for number in sorted(self.ready)[: self.size]]
        if len(chosen) < self.size or any(self._excess(chosen)):
            return None
        for finished in chosen:
            del self.ready[finished.ticket.number]
        self.num_in_training = self.size
        return chosen

    def roll_back(self, batch: Sequence[Finished[Item]]) -> None:
        """Undo the last `take`, which returned the batch: its groups are ready again."""
        assert self.num_in_training == len(batch), "the step of this batch has ended"
        self.ready |= {finished.ticket.number: finished for finished in batch}
        self.num_in_training = 0

    def end_step(self) -> None:
        """The groups in training were trained, and the engines serve the new weights."""
        if self.num_in_training:
            self.num_in_training = 0
            self.step += 1

    def restore(self, finished: Sequence[tuple[int, int, Item]]) -> int:
        """Begin with groups that were finished before a restart: (`Ticket.step`, `Finished.step`, item), oldest first.

        Returns: how many of the oldest ones are left out, because they cannot be trained in time; 0 unless
            `max_staleness` is lower than before the restart.
        """
        assert self._next_number == 0, "groups have started already"
        steps = [started for started, _, _ in finished]
        left_out = next(first for first in range(len(steps) + 1) if self._can_be_trained(steps[first:]))
        for started, ended, item in finished[left_out:]:
            ticket = Ticket(self._next_number, started)
            self._next_number += 1
            self.ready[ticket.number] = Finished(ticket, item, ended)
        return left_out

    def _can_be_trained(self, steps: Sequence[int]) -> bool:
        """Whether groups that started at these steps can all be trained within the bound, from the next step on."""
        oldest = self.step - self.max_staleness
        due = [sum(started <= oldest + j for started in steps) for j in range(self.max_staleness + 1)]
        return min(steps, default=oldest) >= oldest and all(n <= (j + 1) * self.size for j, n in enumerate(due))

    @property
    def untrained(self) -> list[Ticket]:
        """Tickets of running and ready groups, oldest first."""
        tickets = [*self.running.values(), *(finished.ticket for finished in self.ready.values())]
        return sorted(tickets, key=lambda ticket: ticket.number)

    @property
    def awaited(self) -> list[Ticket]:
        """Running groups for which the next batch waits: the oldest, where some must be finished first."""
        chosen = [self.ready[number] for number in sorted(self.ready)[: self.size]]
        missing = self.size - len(chosen) or max(self._excess(chosen))
        return sorted(self.running.values(), key=lambda ticket: ticket.number)[:missing]

    def _excess(self, chosen: Sequence[Finished[Item]]) -> list[int]:
        """For each j of the rule, groups beyond j * size that would be left after training the chosen ones."""
        taken = {finished.ticket.number for finished in chosen}
        left = [ticket.step for ticket in self.untrained if ticket.number not in taken]
        return [
            max(0, sum(started <= self.step - self.max_staleness + j for started in left) - j * self.size)
            for j in range(self.max_staleness + 1)
        ]
