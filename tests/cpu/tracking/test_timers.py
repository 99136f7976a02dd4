"""Timers: unions of spans, read from a clock that the test moves."""

import asyncio

import pytest

from skyrl_train.tracking.timers import Timers, covered_s, outside_s


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_phase(timers: Timers, clock: Clock, phase: str, seconds: float) -> None:
    with timers(phase):
        clock.now += seconds


def test_union_of_spans_counts_no_second_twice():
    assert covered_s([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered_s([]) == 0
    assert outside_s([(0, 10)], [(-1, 2), (5, 7), (6, 12)]) == 3


def test_times_of_a_phase_that_runs_twice_add_up(clock: Clock):
    timers = Timers(clock)
    run_phase(timers, clock, "generate", 2)
    clock.now += 50
    run_phase(timers, clock, "generate", 3)
    assert timers.metrics() == {"timing/generate": 5}


def test_phase_nested_in_itself_counts_once(clock: Clock):
    timers = Timers(clock)
    with timers("eval"):
        clock.now += 1
        run_phase(timers, clock, "eval", 2)
    assert timers.metrics() == {"timing/eval": 3}


def test_overlapping_coroutines_of_one_phase_are_wall_time(clock: Clock):
    timers = Timers(clock)

    async def phase(start: asyncio.Event, end: asyncio.Event) -> None:
        await start.wait()
        with timers("generate"):
            await end.wait()

    async def scenario() -> None:
        marks = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(phase(marks[0], marks[2])), asyncio.create_task(phase(marks[1], marks[3]))]
        for mark in marks:  # first starts, second starts a second later, first ends, second ends
            mark.set()
            await asyncio.sleep(0.001)
            clock.now += 1
        await asyncio.gather(*tasks)

    asyncio.run(scenario())
    assert timers.metrics()["timing/generate"] == 3


def test_time_is_kept_when_the_body_raises(clock: Clock):
    timers = Timers(clock)
    with pytest.raises(RuntimeError), timers("generate"):
        clock.now += 2
        raise RuntimeError
    assert timers.metrics() == {"timing/generate": 2}


def test_open_phase_is_counted_until_now(clock: Clock):
    timers = Timers(clock)
    with timers("step"):
        clock.now += 4
        assert timers.metrics() == {"timing/step": 4}


def test_reset_restarts_open_phases_and_drops_the_others(clock: Clock):
    timers = Timers(clock)
    run_phase(timers, clock, "generate", 2)
    with timers("step"):
        clock.now += 4
        timers.reset()
        clock.now += 1
    assert timers.metrics() == {"timing/step": 1}


def test_driver_share_is_the_step_outside_its_work_phases(clock: Clock):
    timers = Timers(clock)
    with timers("step"):
        run_phase(timers, clock, "generate", 4)
        run_phase(timers, clock, "critic_train", 1)
        run_phase(timers, clock, "convert_to_training_input", 1)
        run_phase(timers, clock, "fwd_logprobs_values_reward", 1)
        run_phase(timers, clock, "policy_train", 2)
        run_phase(timers, clock, "sync_weights", 1)
    assert timers.driver_share() == pytest.approx(0.1)


def test_driver_share_leaves_evaluation_out_wherever_it_runs(clock: Clock):
    timers = Timers(clock)
    with timers("step"):
        run_phase(timers, clock, "generate", 3)
        clock.now += 1
        run_phase(timers, clock, "eval", 100)
    run_phase(timers, clock, "eval", 100)
    assert timers.driver_share() == pytest.approx(0.25)


def test_driver_share_of_overlapping_phases_is_not_negative(clock: Clock):
    timers = Timers(clock)
    with timers("step"), timers("generate"):
        clock.now += 1
        run_phase(timers, clock, "policy_train", 4)
    assert timers.driver_share() == 0


def test_driver_share_without_a_step_is_zero(clock: Clock):
    assert Timers(clock).driver_share() == 0
