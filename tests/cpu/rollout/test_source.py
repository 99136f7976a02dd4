"""Sources: which groups come when, what a checkpoint keeps of it, and the ledger."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.config import load_config
from skyrl_train.rollout.admission import Admission, Failure, Ledger
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, RolloutFailure
from skyrl_train.rollout.source import (
    OnPolicySource,
    SourceFailure,
    SourceParts,
    SourceState,
    groups_of,
    snapshot_of,
    with_metrics_of,
)
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics, Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, engines_of, prompt, sample

CONFIG = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2"]


class World:
    """A source of 10 rows, what it asked for, and a rollout that fails for some of them."""

    def __init__(
        self,
        *overrides: str,
        fails: Callable[[str], bool] = lambda uid: False,
        rewards: Callable[[str, int], float] = lambda uid, number: 1.0,
    ) -> None:
        """Args: rewards: of the number-th sample of a row."""
        self.seeds: dict[str, list[int | None]] = {}
        self.waked, self.fails, self.rewards = 0, fails, rewards

        async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
            self.seeds.setdefault(prompt.uid, []).append(params.seed)
            if self.fails(prompt.uid):
                raise KeyError("no sandbox")
            return sample(self.rewards(prompt.uid, len(self.seeds[prompt.uid])))

        self.timers = Timers()
        self.parts = SourceParts(
            config=load_config([*CONFIG, *overrides]),
            prompts=[prompt(str(n)) for n in range(10)],
            sampling_params=SamplingParams(max_generate_length=4),
            collector=Collector(rollout, engines_of(None)),
            progress=Quiet(),
            timers=self.timers,
            wake_engines=self.wake,
        )
        self.source = OnPolicySource(self.parts)

    async def wake(self) -> None:
        self.waked += 1

    def steps(self, number: int) -> list[list[str]]:
        async def main() -> list[list[str]]:
            return [[group.prompt.uid for group in await self.source.next()] for _ in range(number)]

        return asyncio.run(main())


def test_a_step_has_the_next_rows_of_the_epoch_in_order_and_wakes_the_engines_first():
    world = World()
    steps = world.steps(3)
    assert [len(set(step)) for step in steps] == [4, 4, 4]
    assert not set(steps[0]) & set(steps[1]) and world.waked == 3
    assert world.source.metrics() == {"trainer/epoch": 1.0}, "two batches of four in ten rows"
    assert world.timers.metrics().keys() == {"timing/sync_weights", "timing/generate", "timing/generate_tail"}


def test_the_seeds_of_a_row_depend_on_its_epoch_and_not_on_the_step():
    whole, resumed = World(), World()
    steps = whole.steps(2)
    state = json.loads(json.dumps(whole.source.state))
    steps += whole.steps(2)
    resumed.source.resume(state)
    assert resumed.steps(2) == steps[2:]
    for uid in {uid for step in steps[2:] for uid in step}:
        assert resumed.seeds[uid] == whole.seeds[uid][-len(resumed.seeds[uid]) :]
    repeated = next(uid for uid in steps[0] if uid in {uid for step in steps[2:] for uid in step})
    assert len(set(whole.seeds[repeated])) == 4, "two samples in each of two epochs"
    assert World("trainer.seed=5").steps(1) != steps[:1]


@pytest.mark.parametrize("state", [{}, {"file": 3}, {"epoch": 0, "position": 4, "num_rows": 11, "seed": 42}])
def test_a_state_that_is_not_its_own_is_refused(state: dict[str, Any]):
    with pytest.raises(ValueError, match=r"Set trainer.source, and .*, as there|Use the same data and seed"):
        World().source.resume(state)


def test_groups_that_failed_are_replaced_one_for_one_by_the_next_rows():
    first, second = World().steps(2)
    world = World("generator.max_failed_share=0.5", fails=lambda uid: uid in (first[1], second[0]))
    assert world.steps(1) == [[first[0], first[2], first[3], second[1]]], "the first replacement failed too"
    assert world.source.metrics() == {
        "trainer/epoch": 0.0,
        "generate/num_failed_rollouts": 4.0,
        "generate/num_failed_groups": 2.0,
    }
    assert world.source._admission.ledger == Ledger(generated=6, trained=4, failed=2)
    assert world.source.state["position"] == 6
    (after,) = world.steps(1)
    assert after[:2] == second[2:] and world.source.metrics()["trainer/epoch"] == 1.0, "the next rows, of two epochs"


def test_prompts_that_always_fail_end_the_run_instead_of_using_up_all_rows():
    world = World("generator.max_failed_share=0.5", fails=lambda uid: True)
    with pytest.raises(RuntimeError, match="5 of 8 rollouts of the step failed"):
        world.steps(1)


def test_the_ledger_finds_groups_that_were_lost_or_handed_out_twice():
    admission = Admission(0.5)
    admission.begin(6)
    for uid, reward in (("a", 1.0), ("b", 0.0)):
        assert admission.finish(prompt(uid), [[sample(reward)], [sample(0.0)]]) is not None
    failure = Failure("c", KeyError("x"))
    assert admission.finish(prompt("c"), [failure, [sample(0.0)]]) is None
    ledger = admission.ledger
    ledger.train(2)
    assert ledger == Ledger(generated=3, trained=2, failed=1)
    with pytest.raises(RuntimeError, match="lost or counted twice"):
        ledger.train(1)
    with pytest.raises(RuntimeError, match="lost or counted twice"):
        Ledger(generated=3, trained=2).check()


def test_two_rows_with_one_uid_are_refused():
    """A resumed run would find the first of them for both."""
    parts = World().parts
    with pytest.raises(ValueError, match="two prompts have the uid '3'"):
        replace(parts, prompts=[*parts.prompts, prompt("3")])


def test_a_rollout_whose_last_sample_does_not_end_its_conversation_is_refused():
    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> list[Sample]:
        return [replace(sample(1.0), ends_conversation=False)]

    async def main() -> None:
        collector = Collector(rollout, engines_of(None))
        await collector.collect([prompt("0")], 2, SamplingParams(max_generate_length=4), Quiet(), Admission(0.0))

    with pytest.raises(RolloutFailure, match="last sample has ends_conversation=False"):
        asyncio.run(main())


class Own:
    """A user's source."""

    def __init__(self, parts: SourceParts, next_: Callable[[SourceParts], Any]) -> None:
        self.parts, self._next = parts, next_

    async def next(self) -> Any:
        made = self._next(self.parts)
        return await made if asyncio.iscoroutine(made) else made

    def metrics(self) -> Metrics:
        return {}

    state: SourceState = {}  # noqa: RUF012

    def resume(self, state: SourceState) -> None:
        pass


def misspells(parts: Any) -> Any:
    return parts.prompts.samples


def raises_cancelled(parts: Any) -> Any:
    raise asyncio.CancelledError("of a client")


def exits(parts: Any) -> Any:
    sys.exit("no rows left")


async def collects(parts: SourceParts) -> list[Group]:
    admission = Admission(0.0)
    return await parts.collect(parts.prompts[:2], parts.sampling_params, admission)


@pytest.mark.parametrize(
    ("next_", "problem"),
    [
        (misspells, r"failed: AttributeError: 'list' object has no attribute 'samples' \(.*test_source.py:\d+\)$"),
        (raises_cancelled, r"failed: CancelledError: of a client \(.*test_source.py:\d+\)$"),
        (exits, r"failed: SystemExit: no rows left \(.*test_source.py:\d+\)$"),
        (lambda parts: {}["x"], r"failed: KeyError: 'x' \(.*test_source.py:\d+\)$"),
        (lambda parts: [], r"returned no groups: next\(\) must wait for at least one, or raise"),
        (lambda parts: None, r"returned None: next\(\) must return a list of groups \(skyrl_train.types.Group\)$"),
        (lambda parts: ["x", "y"], r"returned \['x', 'y'\]: next\(\) must return a list of groups"),
    ],
)
def test_an_error_of_a_users_source_names_it_and_its_line(next_: Callable[[SourceParts], Any], problem: str):
    with pytest.raises(SourceFailure, match=rf"^the source tests.cpu.rollout.test_source:Own {problem}"):
        asyncio.run(groups_of(Own(World().parts, next_)))


@pytest.mark.parametrize(
    ("metrics", "kept", "said"),
    [
        (
            {"own/ok": 1.0, "own/t": torch.tensor(2.0), "own/text": "x", "own/rows": [1.0]},
            {"own/ok": 1.0, "own/t": 2.0},
            "the metric own/rows of the source tests.cpu.rollout.test_source:Reports is left out: it is a list",
        ),
        (None, {}, "metrics() returned None. Return a dict of numbers"),
        (KeyError("rows"), {}, "are left out: KeyError: 'rows' ("),
    ],
)
def test_metrics_of_a_users_source_that_are_no_numbers_cost_themselves_alone(
    metrics: Any, kept: dict[str, float], said: str, caplog: pytest.LogCaptureFixture
):
    """A tracker that gets anything else fails, and the run trains on without it."""

    class Reports:
        def metrics(self) -> Any:
            if isinstance(metrics, Exception):
                raise metrics
            return metrics

    Reports.__qualname__ = "Reports"
    assert with_metrics_of(Reports(), {}) == kept  # type: ignore[arg-type]
    assert said in caplog.text


def test_numbers_of_numpy_and_torch_in_a_state_are_plain_and_the_state_is_a_copy():
    source = Own(World().parts, lambda parts: None)
    seen = [np.int64(3), {"share": np.float32(0.5), "last": torch.tensor(7)}, None, True, "x", math.inf, (1, (2,))]
    source.state = {"seen": seen}
    state, groups = snapshot_of(source)
    seen.clear()
    plain = [3, {"share": 0.5, "last": 7}, None, True, "x", math.inf, [1, [2]]]
    assert state == {"seen": plain} and groups == b""
    assert json.loads(json.dumps(state)) == state
    assert snapshot_of(source, {"file": np.int8(1)}) == ({"file": 1}, b"")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"used": {2: 1, 10: 1}}, r"state\['used'\] has the key int 2"),
        ({"rows": [{"at": b"x"}]}, r"state\['rows'\]\[0\]\['at'\] is bytes b'x'"),
        ({"left": {1}}, r"state\['left'\] is set \{1\}"),
        ({"used": np.zeros(2)}, r"state\['used'\] is ndarray array\(\[0., 0.\]\)"),
        ({"used": torch.zeros(2)}, r"state\['used'\] is a tensor of dtype float32 and shape \[2\]"),
        ([1], "state is list"),
        (None, "state is NoneType"),
    ],
)
def test_a_state_that_a_checkpoint_would_not_return_is_refused_with_its_entry(state: Any, problem: str):
    source = Own(World().parts, lambda parts: None)
    source.state = state
    said = rf"^the source tests.cpu.rollout.test_source:Own cannot be saved in a checkpoint: {problem}.*\. Return from"
    with pytest.raises(SourceFailure, match=said):
        snapshot_of(source)


def test_a_metric_of_a_users_source_with_a_name_of_the_runs_own_is_a_warning_once(caplog: pytest.LogCaptureFixture):
    class Reports:
        def metrics(self) -> Metrics:
            return {"reward/avg_raw_reward": 99.0, "own/x": 2.0}

    for _ in range(2):
        metrics = with_metrics_of(Reports(), {"reward/avg_raw_reward": 0.5})  # type: ignore[arg-type]
        assert metrics == {"reward/avg_raw_reward": 0.5, "own/x": 2.0}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the metric reward/avg_raw_reward of the source tests.cpu.rollout.test_source:")
    assert warning.endswith("is left out: the run logs its own by this name. Rename it")


def test_errors_of_rollouts_engines_and_cancellation_pass_a_users_source_as_they_are():
    with pytest.raises(RolloutFailure, match="^the rollout .* failed"):
        asyncio.run(groups_of(Own(World(fails=lambda uid: True).parts, collects)))

    async def broken(*args: Any) -> Any:
        raise ConnectionError("engine 0 is gone")

    async def asks(prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
        return await engines.generate([1], params, prompt.uid)

    parts = replace(World().parts, collector=Collector(asks, engines_of(broken)))
    with pytest.raises(ConnectionError, match="^engine 0 is gone"):
        asyncio.run(groups_of(Own(parts, collects)))

    async def is_cancelled() -> None:
        task = asyncio.create_task(groups_of(Own(parts, lambda parts: asyncio.sleep(100))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(is_cancelled())


def test_errors_of_a_built_in_source_are_as_they_are():
    world = World()
    world.source._order = None  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="^'NoneType' object"):
        asyncio.run(groups_of(world.source))


def test_an_evaluation_scores_a_prompt_by_any_sample_that_is_left():
    failed = Failure("0", KeyError("no sandbox"))
    for least, is_kept in ((2, False), (1, True)):
        admission = Admission(1.0, min_samples=least)
        admission.begin(4)
        assert (admission.finish(prompt("0"), [[sample(1.0)], failed, failed, failed]) is not None) is is_kept
        assert admission.finish(prompt("0"), [failed] * 4) is None
