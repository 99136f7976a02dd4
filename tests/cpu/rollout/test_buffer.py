"""The admission of a streaming source on virtual time, and bugs of other frameworks, which the simulation must find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.rollout.streaming.buffer import Buffer, Finished, Ticket
from tests.support.streaming import Prompts, Simulation

BOUNDS = [(bound, depth) for bound in range(5) for depth in range(bound + 1)]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    bounds=st.sampled_from(BOUNDS),
    seed=st.integers(0, 2**31),
    failed=st.sampled_from([0.0, 0.1, 0.9]),
    restarts=st.sampled_from([0.0, 0.1]),
    deaths=st.sampled_from([0.0, 0.2]),
)
def test_no_step_waits_forever_and_no_group_is_trained_late_lost_or_twice(
    size: int, bounds: tuple[int, int], seed: int, failed: float, restarts: float, deaths: float
):
    Simulation(size, *bounds, seed, failed, restarts, deaths).run(40)


@pytest.mark.parametrize(("bound", "depth"), [(1, 1), (4, 1), (4, 4)])
def test_thousands_of_steps_reach_the_bound_and_stay_within(bound: int, depth: int):
    simulation = Simulation(4, bound, depth, 1, failed_share=0.2, restart_share=0.001, death_share=0.01)
    simulation.run(3500)
    assert simulation.max_seen == bound


@pytest.mark.parametrize(("bound", "depth"), BOUNDS)
def test_without_latencies_the_staleness_is_the_step_up_to_the_depth(bound: int, depth: int):
    buffer = Prompts(3, bound, depth)
    for step in range(8):
        while buffer.capacity:
            buffer.finish(buffer.submit(), 0)
        batch = buffer.take()
        assert batch is not None and {step - finished.ticket.step for finished in batch} == {min(step, depth)}
        buffer.end_step()


def test_the_last_steps_start_no_group_that_nobody_trains():
    buffer = Prompts(2, 1, 1, num_steps=3)
    started = 0
    for _ in range(3):
        while buffer.capacity:
            buffer.finish(buffer.submit(), 0)
            started += 1
        assert buffer.take() is not None
        buffer.end_step()
    assert started == 6 and not buffer.untrained and buffer.capacity == 0


def test_a_straggler_is_named_when_the_next_step_waits_for_it():
    buffer = Prompts(2, 1, 1)
    tickets = [buffer.submit() for _ in range(4)]
    for ticket in tickets[1:]:
        buffer.finish(ticket, 0)
    assert buffer.take() is not None, "it is not due yet"
    buffer.end_step()
    for _ in range(2):
        buffer.finish(buffer.submit(), 0)
    assert buffer.take() is None and buffer.awaited == [tickets[0]]
    buffer.finish(tickets[0], 0)
    batch = buffer.take()
    assert batch is not None and batch[0].ticket == tickets[0]


def test_finished_groups_that_are_too_old_for_a_lower_bound_are_left_out():
    finished = [(3, 3, 10), (3, 4, 11), (4, 4, 12), (4, 4, 13)]
    for bound, left_out in [(2, 0), (1, 0), (0, 2)]:
        buffer = Prompts(2, bound, 0, step=4)
        assert buffer.restore(finished) == left_out, bound
        assert [each.item for each in buffer.ready.values()] == [10, 11, 12, 13][left_out:]
    crowded = Prompts(2, 1, 0, step=4)
    assert crowded.restore([(3, 3, n) for n in range(5)]) == 3, "two of them fit into the step in which they are due"


@pytest.mark.parametrize(("size", "bound", "depth"), [(0, 1, 1), (2, 1, 2), (2, -1, 0), (2, 1, -1)])
def test_bounds_that_cannot_fill_a_step_are_refused(size: int, bound: int, depth: int):
    with pytest.raises(ValueError, match="cannot fill a step"):
        Buffer(size, bound, depth)


class OneTooMany(Prompts):
    @property
    def capacity(self) -> int:
        return (self.depth + 1) * self.size - self.num_in_training - len(self.untrained) + 1


class ScaledByRanks(Prompts):
    @property
    def capacity(self) -> int:
        return 2 * (self.depth + 1) * self.size - self.num_in_training - len(self.untrained)


class WithoutThoseInTraining(Prompts):
    @property
    def capacity(self) -> int:
        return (self.depth + 1) * self.size - len(self.untrained)


class AdmissionAlone(Prompts):
    """The common formula: whatever is ready is trained."""

    def _excess(self, chosen: object) -> list[int]:
        return [0]


class WaitsForTheDueAlone(Prompts):
    def _excess(self, chosen: object) -> list[int]:
        return super()._excess(chosen)[:1]  # type: ignore[arg-type]


class ForgetsFailedGroups(Simulation):
    """The task of a failed group ends and its capacity stays taken."""

    def drop(self, ticket: Ticket) -> None:
        pass


class DropsOnResume(Simulation):
    def resumed(self, pending: list[int]) -> list[int]:
        return []


class DropsFinishedGroupsOnResume(Simulation):
    def restored(self, ready: list[Finished[int]]) -> list[Finished[int]]:
        return []


class CountsTheTrainedOnResume(Simulation):
    """Groups of before the restart count as accepted, so fewer are admitted after it."""

    def restart(self) -> None:
        super().restart()
        self.buffer.num_in_training = self.size


class AbortsDuringAPause(Simulation):
    """Requests that run while the weights change are aborted, and nobody starts them again."""

    def update(self) -> None:
        for number in list(self.prompts)[:1]:
            self.events = [event for event in self.events if event[2] != number]
            del self.prompts[number]


@pytest.mark.parametrize(
    ("kind", "simulation"),
    [
        (OneTooMany, Simulation),
        (ScaledByRanks, Simulation),
        (WithoutThoseInTraining, Simulation),
        (AdmissionAlone, Simulation),
        (WaitsForTheDueAlone, Simulation),
        (Buffer, ForgetsFailedGroups),
        (Buffer, DropsOnResume),
        (Buffer, DropsFinishedGroupsOnResume),
        (Buffer, CountsTheTrainedOnResume),
        (Buffer, AbortsDuringAPause),
    ],
)
@pytest.mark.parametrize("bound", [2, 4])
def test_bugs_of_other_frameworks_are_found(kind: type[Prompts], simulation: type[Simulation], bound: int):
    planted = simulation(4, bound, bound, 1, failed_share=0.2, restart_share=0.05, death_share=0.1, kind=kind)
    with pytest.raises((AssertionError, RuntimeError)):
        planted.run(1000)
