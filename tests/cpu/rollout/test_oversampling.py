"""Oversampling: which groups a step trains, what becomes of the others, and that no row is lost or starved."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from skyrl_train.config import load_config
from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, RolloutFailure
from skyrl_train.rollout.oversampling import MAX_CANCELLED, OverSamplingSource, on_policy_source
from skyrl_train.rollout.source import OnPolicySource, SourceParts
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, engines_of, prompt, sample

CONFIG = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2"]
FILTER = "trainer.algorithm.dynamic_sampling.type=filter"
ROWS = 24
cached_config = functools.cache(load_config)


class World:
    """A source of 24 rows, whose rollouts take as many turns of the event loop as `turns` says."""

    def __init__(
        self,
        *overrides: str,
        number: int | None = 6,
        turns: Callable[[str, int], int] = lambda uid, start: 1,
        rewards: Callable[[str, int], float] = lambda uid, number: float(number % 2),
        waits: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Args: number: over_sampling_batch_size; turns, rewards: of (uid, how often its rollouts have started); waits:
        before the turns.
        """
        self.seeds: dict[str, list[int | None]] = {}
        self.cancelled: Counter[str] = Counter()
        self.running = 0

        async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
            started = self.seeds.setdefault(prompt.uid, [])
            started.append(params.seed)
            number = len(started)
            self.running += 1
            try:
                if waits is not None:
                    await waits(prompt.uid)
                for _ in range(turns(prompt.uid, number)):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.cancelled[prompt.uid] += 1
                raise
            finally:
                self.running -= 1
            return sample(rewards(prompt.uid, number))

        config = cached_config((*CONFIG, *overrides))
        self.source = on_policy_source(
            SourceParts(
                config=replace(config, trainer=replace(config.trainer, over_sampling_batch_size=number)),
                prompts=[prompt(str(n)) for n in range(ROWS)],
                sampling_params=SamplingParams(max_generate_length=4),
                collector=Collector(rollout, engines_of(None)),
                progress=Quiet(),
                timers=Timers(),
                wake_engines=self.wake,
            )
        )

    async def wake(self) -> None:
        assert self.running == 0, "a step begins without rollouts of the last one"

    def steps(self, number: int) -> list[list[str]]:
        async def main() -> list[list[str]]:
            steps = []
            for _ in range(number):
                steps.append([group.prompt.uid for group in await self.source.next()])
                assert self.running == 0, "what was cancelled has ended"
            return steps

        return asyncio.run(main())

    @property
    def ledger(self) -> Ledger:
        return self.source._admission.ledger


def rows_in_order(number: int) -> list[str]:
    return [uid for step in World(number=None).steps(number // 4) for uid in step]


def test_without_the_key_the_source_is_the_plain_one():
    assert isinstance(World(number=None).source, OnPolicySource)
    assert isinstance(World().source, OverSamplingSource)


def test_a_step_trains_the_first_complete_groups_and_the_others_start_again_first_with_the_same_seeds():
    order = rows_in_order(16)
    slow = {order[1], order[4]}
    world = World(turns=lambda uid, number: 50 if uid in slow and number <= 2 else 3)
    first, second = world.steps(2)
    assert first == [order[index] for index in (0, 2, 3, 5)]
    assert world.source.metrics() == {"trainer/epoch": 0.0, "generate/num_cancelled_groups": 2.0}
    assert second == [order[1], order[4], order[6], order[7]], "four of six started that end together, as started"
    assert world.cancelled == {order[1]: 2, order[4]: 2}
    seeds = world.seeds[order[1]]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
    assert world.ledger == Ledger(generated=12, trained=8, cancelled=4), "two ran, two were complete and not needed"


def test_a_row_that_was_cancelled_twice_is_waited_for():
    order = rows_in_order(16)
    world = World(turns=lambda uid, number: 1000 if uid == order[2] else 3)
    steps = world.steps(MAX_CANCELLED + 1)
    assert [order[2] in step for step in steps] == [False] * MAX_CANCELLED + [True]
    assert world.cancelled[order[2]] == 2 * MAX_CANCELLED


@pytest.mark.parametrize("number", [5, 6, 8, 12, 24])
def test_every_row_of_an_epoch_is_trained_once_and_none_is_late_by_more_than_the_bound(number):
    draw = random.Random(number)
    world = World(number=number, turns=lambda uid, _: draw.randrange(1, 60))
    steps = world.steps(2 * ROWS // 4)
    waiting = Counter(row.prompt.uid for row in world.source._waiting)
    trained = Counter(uid for step in steps for uid in step)
    assert trained.total() == 2 * ROWS and waiting.total() <= number - 4
    sampled = trained + waiting
    assert max(sampled.values()) - min(sampled.values()) <= 1, "each epoch has each row once, whatever was cancelled"
    longest = MAX_CANCELLED + -(-(number - 4) // 4) - 1
    assert max(row.num_cancelled for row in world.source._waiting) <= longest


def test_filtered_groups_are_replaced_one_for_one_while_others_run():
    order = rows_in_order(16)
    easy = set(order[:3])
    world = World(FILTER, rewards=lambda uid, number: 1.0 if uid in easy else float(number % 2))
    (step,) = world.steps(1)
    assert len(step) == 4 and not set(step) & easy
    ledger = world.ledger
    assert (ledger.trained, ledger.filtered) == (4, 3) and ledger.generated == 7 + ledger.cancelled
    metrics = world.source.metrics()
    assert metrics["generate/num_filtered_groups"] == 3 and metrics["generate/num_cancelled_groups"] == ledger.cancelled


def test_filtering_without_an_end_stops_at_the_limit():
    with pytest.raises(RuntimeError, match="12 groups .* as many as .*max_sample_batches allows"):
        World(FILTER, "trainer.algorithm.dynamic_sampling.max_sample_batches=2", rewards=lambda uid, _: 1.0).steps(1)


def test_an_error_of_one_group_ends_the_others_and_the_step():
    async def main(world: World) -> int:
        with pytest.raises(RolloutFailure, match="KeyError: 'no sandbox'"):
            await world.source.next()
        return world.running

    def failing(uid: str, number: int) -> float:
        raise KeyError("no sandbox")

    assert asyncio.run(main(World(rewards=failing))) == 0


def test_a_rollout_that_ends_although_it_was_cancelled_is_counted_once():
    order = rows_in_order(8)

    async def stubborn(uid: str) -> None:
        try:
            await asyncio.sleep(60 if uid == order[0] else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(0)

    world = World(waits=stubborn)
    assert world.steps(1) == [order[1:5]]
    assert world.ledger == Ledger(generated=6, trained=4, cancelled=2)
    assert [row.prompt.uid for row in world.source._waiting] == [order[0], order[5]]


def test_a_resumed_source_starts_with_the_cancelled_rows():
    order = rows_in_order(16)
    first = World(turns=lambda uid, number: 50 if uid in order[:2] else 3)
    first.steps(1)
    state = first.source.state
    assert state.keys() == {"order", "cancelled"}, "a resumed run looks for the order there"
    assert state["cancelled"] == [[order[0], 0, 1], [order[1], 0, 1]]
    resumed = World()
    resumed.source.resume(state)
    assert resumed.steps(1) == [[order[0], order[1], order[6], order[7]]]
    late = World()
    late.source.resume(World(number=None).source.state)  # switched on for a run that began without it
    assert late.steps(1) == [order[:4]]
    with pytest.raises(ValueError, match="over_sampling_batch_size, as there"):
        World(number=None).source.resume(state)
