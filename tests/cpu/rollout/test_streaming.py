"""The streaming source around fake engines: order, staleness, failures, checkpoints, and equality at staleness 0."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import threading
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import skyrl_gym
import torch
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.checks.rl import check
from skyrl_train.config import ConfigError, load_config
from skyrl_train.rollout.admission import Ledger, TooManyFailures
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, Requests, RolloutFailure
from skyrl_train.rollout.source import OnPolicySource, SourceParts
from skyrl_train.rollout.streaming.saved_groups import SavedGroup, from_bytes, to_bytes
from skyrl_train.rollout.streaming.streaming import StreamingSource
from skyrl_train.rollout.streaming.watchdog import NoProgress, no_progress
from skyrl_train.rollout.trace import Trace
from skyrl_train.tracking.console import waiting_line
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import UNKNOWN_VERSION, Generation, Group, Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, engines_of, prompt, sample
from tests.support.scripted import Script, sampler
from tests.support.tiny import chatml_tokenizer

CONFIG = [
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "trainer.source=streaming",
]
LOGLINEAR = "trainer.algorithm.prox_logp_method=loglinear"
CORRECTED_KL = "trainer.algorithm.use_corrected_kl=true"
LORA = "trainer.policy.model.lora"
KL_REWARD = ["trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"]
Play = Callable[["World", Prompt, int], Awaitable[None]]
"""Waits or raises. Args: the world, the prompt, the number of rollouts of this prompt so far."""


async def at_once(world: World, prompt: Prompt, number: int) -> None:
    """Ends in the same iteration of the event loop."""


class World:
    """A source, an engine whose samples have the version at their first and last token, and a trainer."""

    def __init__(
        self,
        *overrides: str,
        play: Play = at_once,
        kind: Callable[[SourceParts], Any] = StreamingSource,
        num_rows: int = 10,
        num_steps: int | None = None,
        reward: Callable[[str, int], float] = lambda uid, number: float(number % 2),
    ) -> None:
        self.version, self.calls, self.seeds = 0, dict[str, int](), list[tuple[str, int | None]]()
        self.recorded: dict[int, list[tuple[int, int]]] = {}
        """Id of a sample's tokens -> (version, tokens) that the engine saw."""

        async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
            number = self.calls[prompt.uid] = self.calls.get(prompt.uid, 0) + 1
            self.seeds.append((prompt.uid, params.seed))
            first = self.version
            await play(self, prompt, number)
            spans = [(first, 1), (self.version, 2)]
            trace = Trace()
            trace.read([4, 5])
            trace.write(Generation([6, 7, 8], [-1.0] * 3, "6", "stop", first, tuple(spans)))
            trace.add_reward(reward(prompt.uid, number))
            sample = trace.to_sample()
            self.recorded[id(sample)] = spans
            return sample

        self.source = kind(
            SourceParts(
                config=load_config([*CONFIG, *overrides]),
                prompts=[prompt(str(n)) for n in range(num_rows)],
                sampling_params=SamplingParams(max_generate_length=4),
                collector=Collector(rollout, engines_of(None)),
                progress=Quiet(),
                timers=Timers(),
                wake_engines=self.wake,
                policy_version=lambda: self.version,
                num_steps=num_steps,
            )
        )

    async def wake(self) -> None:
        pass

    async def step(self, *, update_s: float = 0.0) -> list[Group]:
        """Take a batch, train and publish: the version grows by the optimizer steps of the step."""
        groups: list[Group] = await self.source.next()
        await asyncio.sleep(update_s)
        for _ in range(3):
            await asyncio.sleep(0)
        self.version += 2
        return groups

    async def steps(self, number: int, **kwargs: float) -> list[list[str]]:
        return [uids(await self.step(**kwargs)) for _ in range(number)]


def uids(groups: list[Group]) -> list[str]:
    return [group.prompt.uid for group in groups]


async def slowly(world: World, prompt: Prompt, number: int) -> None:
    """Latencies over three orders of magnitude, which depend on the prompt and the version."""
    generator = random.Random(f"{prompt.uid} {number} {world.version}")
    await asyncio.sleep(10 ** generator.uniform(-5, -2))


@pytest.mark.parametrize(("bound", "depth"), [(0, 0), (1, 0), (1, 1), (3, 1), (3, 3)])
def test_without_latency_the_staleness_is_the_step_up_to_the_depth(bound: int, depth: int):
    async def main() -> None:
        world = World(f"trainer.max_staleness={bound}", f"trainer.pipeline_depth={depth}")
        for step in range(8):
            await world.step()
            metrics = world.source.metrics()
            assert metrics["async/staleness_max"] == metrics["async/staleness_mean"] == min(step, depth)
        await world.source.close()

    asyncio.run(main())


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_staleness_in_the_log_is_what_the_engine_saw_and_within_the_bound(bound: int):
    async def main() -> None:
        world = World(f"trainer.max_staleness={bound}", play=slowly)
        for step in range(30):
            groups = await world.source.next()
            saw = [
                (step - version // 2, count)
                for group in groups
                for sample in group.samples
                for version, count in world.recorded[id(sample)]
            ]
            metrics = world.source.metrics()
            assert metrics["async/staleness_max"] == max(behind for behind, _ in saw) <= bound
            total = sum(count for _, count in saw)
            assert metrics["async/staleness_mean"] == sum(behind * count for behind, count in saw) / total
            shares = [sum(count for each, count in saw if each == behind) / total for behind in range(bound + 1)]
            assert shares == [metrics[f"async/share_{behind}_behind"] for behind in range(bound + 1)]
            await asyncio.sleep(0.003)
            world.version += 2
        await world.source.close()

    asyncio.run(main())


def test_samples_of_which_only_the_version_is_known_have_its_staleness():
    async def main() -> None:
        world = World("trainer.max_staleness=1")
        collector = world.source._parts.collector
        rollout = collector._rollout

        async def without_spans(*args: Any) -> Sample:
            made = await rollout(*args)
            assert isinstance(made, Sample)
            return replace(made, version_spans=())

        collector._rollout = without_spans
        for _ in range(3):
            await world.step()
        metrics = world.source.metrics()
        assert metrics["async/staleness_mean"] == metrics["async/share_1_behind"] == 1
        assert metrics["perf/generate_tokens_per_s"] > 0
        await world.source.close()

    asyncio.run(main())


def test_tokens_that_are_masked_have_no_staleness():
    async def main() -> None:
        world = World("trainer.max_staleness=1", "generator.apply_overlong_filtering=true")
        collector = world.source._parts.collector
        rollout = collector._rollout

        async def long_ones_are_old(*args: Any) -> Sample:
            made = await rollout(*args)
            assert isinstance(made, Sample)
            return made if made.reward else replace(made, stop_reason="length", version_spans=((0, 3),))

        collector._rollout = long_ones_are_old
        for _ in range(4):
            await world.step()
        metrics = world.source.metrics()
        assert metrics["async/staleness_max"] == metrics["async/staleness_mean"] == metrics["async/share_1_behind"] == 1
        await world.source.close()

    asyncio.run(main())


def test_engines_of_shared_devices_are_idle_during_the_update():
    """Groups run all the time, as the update freezes them."""

    async def main(shared: str) -> float:
        awake, now = asyncio.Event(), 0.0

        async def when_awake(world: World, prompt: Prompt, number: int) -> None:
            nonlocal now
            await awake.wait()
            now += 0.01
            await asyncio.sleep(0)

        world = World(f"trainer.placement.colocate_all={shared}", play=when_awake)
        world.source._metrics.clock = lambda: now

        async def wake() -> None:
            awake.set()

        object.__setattr__(world.source._parts, "wake_engines", wake)
        for _ in range(3):
            await world.source.next()
            awake.clear()
            now += 1.0
            for _ in range(10):
                await asyncio.sleep(0)
            world.version += 2
        await world.source.close()
        return float(world.source.metrics()["async/engine_idle_share"])

    assert asyncio.run(main("true")) > 0.5
    assert asyncio.run(main("false")) == 0


@pytest.mark.parametrize(
    ("num_rows", "without_signal"),
    [(4, {1}), (5, {2, 3}), (6, {0, 2, 5}), (10, {0, 1, 4, 6, 8}), (13, {1, 2, 4, 8, 9, 12})],
)
@pytest.mark.parametrize("overrides", [[], ["trainer.algorithm.dynamic_sampling.type=filter"]])
def test_at_staleness_0_it_gives_what_the_synchronous_source_gives(
    overrides: list[str], num_rows: int, without_signal: set[int]
):
    """Rows, order, seeds, rewards and filtered groups, over epochs, though rollouts end in another order."""

    def reward(uid: str, number: int) -> float:
        return 1.0 if int(uid) in without_signal else float(number % 2)

    async def main(kind: Callable[[SourceParts], Any], *more: str) -> tuple[Any, ...]:
        world = World(*overrides, *more, play=slowly, kind=kind, reward=reward, num_rows=num_rows)
        steps = [[(g.prompt.uid, [s.reward for s in g.samples]) for g in await world.step()] for _ in range(8)]
        return steps, sorted(world.seeds), world.source.metrics()["trainer/epoch"]

    streamed = asyncio.run(main(StreamingSource, "trainer.max_staleness=0"))
    assert streamed == asyncio.run(main(OnPolicySource, "trainer.source=on_policy"))


def test_generation_continues_during_the_update_and_the_update_waits_for_its_batch():
    async def main() -> None:
        update = asyncio.Event()

        async def play(world: World, prompt: Prompt, number: int) -> None:
            if len(world.seeds) > 8:
                await update.wait()

        world = World(play=play)
        groups = await world.source.next()
        assert [len(group.samples) for group in groups] == [2] * 4
        assert world.source.metrics()["async/running"] == 4
        update.set()
        while len(world.source._buffer.ready) < 4:
            await asyncio.sleep(0)
        update.clear()
        assert len(await world.source.next()) == 4, "generated during the update; the others wait for the next"
        await world.source.close()

    asyncio.run(main())


def test_each_row_is_trained_once_in_an_epoch_and_nothing_is_started_for_after_the_last_step():
    async def main() -> None:
        world = World("trainer.max_staleness=3", "trainer.pipeline_depth=3", play=slowly, num_rows=12, num_steps=6)
        steps = await world.steps(6)
        trained = [uid for step in steps for uid in step]
        assert sorted(trained) == sorted(2 * [str(n) for n in range(12)])
        assert world.source._admission.ledger == Ledger(generated=24, trained=24)

    asyncio.run(main())


def test_a_rollout_that_fails_once_is_repeated_with_its_seed():
    async def fails_once(world: World, prompt: Prompt, number: int) -> None:
        if prompt.uid in ("3", "5") and number == 1:
            raise KeyError("no sandbox")

    async def main() -> None:
        world = World("trainer.max_staleness=0", play=fails_once)
        groups = [group for _ in range(2) for group in await world.step()]
        assert all(len(group.samples) == 2 for group in groups)
        assert world.source.metrics()["generate/num_retried_rollouts"] <= 2
        for uid in set(uids(groups)) & {"3", "5"}:
            seeds = [seed for other, seed in world.seeds if other == uid]
            assert len(seeds) == 3 and len(set(seeds)) == 2
        await world.source.close()

    asyncio.run(main())


def test_groups_that_fail_are_replaced_one_for_one_and_the_next_steps_are_full():
    async def fails(world: World, prompt: Prompt, number: int) -> None:
        await slowly(world, prompt, number)
        if prompt.uid in ("3", "7"):
            raise KeyError("no sandbox")

    async def main() -> None:
        world = World("generator.max_failed_share=0.9", play=fails, num_rows=30)
        for step in await world.steps(20):
            assert len(step) == 4 and not {"3", "7"} & set(step)
        ledger = world.source._admission.ledger
        assert ledger.failed >= 4 and ledger.trained == 80
        assert len(world.source._buffer.untrained) == 4
        await world.source.close()

    asyncio.run(main())


def test_too_many_failures_end_the_run_with_their_reasons():
    async def fails(world: World, prompt: Prompt, number: int) -> None:
        raise KeyError("no sandbox")

    async def main(*overrides: str) -> None:
        world = World(*overrides, play=fails)
        try:
            await world.step()
        finally:
            await world.source.close()

    with pytest.raises(TooManyFailures, match="5 of 8 rollouts of the step failed.*no sandbox"):
        asyncio.run(main("generator.max_failed_share=0.5"))
    with pytest.raises(RolloutFailure, match="KeyError: 'no sandbox'"):
        asyncio.run(main())


def test_an_error_during_the_update_is_raised_by_the_next_step_and_ends_the_other_rollouts():
    async def main() -> None:
        cancelled = []

        async def play(world: World, prompt: Prompt, number: int) -> None:
            if world.version == 0 and len(world.seeds) <= 8:
                return
            if prompt.uid == world.seeds[8][0]:
                raise KeyError("the pump died")
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(prompt.uid)
                raise

        world = World(play=play)
        await world.step(update_s=0.01)
        with pytest.raises(RolloutFailure, match="KeyError: 'the pump died'"):
            await asyncio.wait_for(world.source.next(), 30)
        assert len(cancelled) == 6
        with pytest.raises(RolloutFailure, match="KeyError: 'the pump died'"):
            await world.source.next()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("cancels", "problem"), [(True, "code cancelled its task"), (False, "failed .*CancelledError")]
)
def test_a_rollout_that_cancels_itself_ends_the_run_with_an_error(cancels: bool, problem: str):
    async def play(world: World, prompt: Prompt, number: int) -> None:
        task = asyncio.current_task()
        if not cancels or task is None:
            raise asyncio.CancelledError
        task.cancel()
        await asyncio.sleep(0)

    async def main() -> None:
        world = World(play=play)
        with pytest.raises(RuntimeError, match=problem):
            await asyncio.wait_for(world.source.next(), 30)
        await world.source.close()

    asyncio.run(main())


async def hangs_in_its_own_code(world: World, prompt: Prompt, number: int) -> None:
    if prompt.uid == world.seeds[0][0] and number == 2:
        await asyncio.sleep(100)


async def hangs_in_the_engines(world: World, prompt: Prompt, number: int) -> None:
    with world.source._parts.collector.requests.waiting():
        await asyncio.sleep(100)


async def moves_for_long(world: World, prompt: Prompt, number: int) -> None:
    for _ in range(12):
        await asyncio.sleep(0.05)
        with world.source._parts.collector.requests.waiting():
            pass


def test_rollouts_that_move_may_take_longer_than_the_deadline_and_are_warned_of(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        world = World("trainer.max_staleness=0", play=moves_for_long)
        world.source._deadline_s = 0.3
        assert await world.source.next()
        assert "no rollout has ended for 0 s, though engines or environments answer" in caplog.text
        await world.source.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("play", "cause"),
    [
        (hangs_in_its_own_code, "no request is at the engines: environments, or the rollouts' own code, do not return"),
        (hangs_in_the_engines, "the engines hold 8 requests and answer none; the oldest was sent 0 s ago"),
    ],
)
def test_a_rollout_that_never_ends_is_named_with_who_waits_for_whom(
    play: Play, cause: str, caplog: pytest.LogCaptureFixture
):
    async def main() -> None:
        world = World("trainer.max_staleness=0", play=play)
        world.source._deadline_s = 0.1
        with pytest.raises(NoProgress) as raised:
            await world.source.next()
        assert cause in str(raised.value)
        assert f"Step 1 waits for prompt {world.seeds[0][0]} (" in str(raised.value)
        assert f"in {play.__name__}" in caplog.text, "the stack goes down to where the rollout waits"
        state, _ = world.source.snapshot()
        assert len(state["pending"]) + state["ledger"]["waiting"] == 4, "its state can still be saved"
        await world.source.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_requests": 3}, "the engines hold 3 requests and answer none; the oldest was sent 62 s ago"),
        ({"num_running": 2}, "no request is at the engines: environments, or the rollouts' own code, do not return"),
        ({"num_running": 0}, "no group runs, and none may start"),
    ],
)
def test_the_cause_of_a_stall_is_the_part_for_which_the_others_wait(changes: dict[str, Any], cause: str):
    now = iter([0.0] * 9)
    with contextlib.ExitStack() as stack:
        requests = Requests(lambda: next(now))
        for _ in range(changes.get("num_requests", 0)):
            stack.enter_context(requests.waiting())
        now = iter([62.0] * 9)
        running = changes.get("num_running", 2)
        text = str(no_progress(60, requests, num_running=running, waits="Step 7 waits", failures=["no disk"]))
    assert (
        cause in text and "no rollout, request or environment call ended for 60 s" in text and ". Step 7 waits." in text
    )
    assert "1 rollouts failed since the last step: no disk" in text


class WithAWorker(BaseTextEnv):
    """Answers with the help of a process of its own."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.number, self.eight_exist = next(extras["numbers"]), extras["eight_exist"]
        self.is_killed = self.number in extras["killed"]
        if self.number == 7:
            self.eight_exist.set()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.is_killed:
            assert self.eight_exist.wait(60), "the repetition of a rollout is the ninth"
            self.worker.kill()
            self.worker.wait()
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write("1\n")
        self.worker.stdin.flush()
        reward = float(self.worker.stdout.readline()) + self.number
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    def close(self) -> None:
        self.worker.kill()
        self.worker.communicate()


@pytest.mark.parametrize("killed", [{3}, {3, 8}])
def test_a_worker_process_of_an_environment_that_is_killed_costs_a_repetition_or_its_sample(killed: set[int]):
    """kill -9 in the middle of a call. The environment that repeats the rollout is the ninth of eight."""

    async def main() -> None:
        own = {"killed": killed, "numbers": itertools.count(), "eight_exist": threading.Event()}
        sizes = ["trainer.train_batch_size=2", "generator.n_samples_per_prompt=4", "generator.max_failed_share=0.2"]
        with sampler(chatml_tokenizer(), Script(chatml_tokenizer(), "5"), timeout_s=90.0) as played:
            world = World("trainer.max_staleness=0", *sizes, num_steps=1)
            world.source._parts = replace(world.source._parts, collector=played.collector)
            world.source._order._rows = [replace(prompt(str(n)), env_class="workers", extras=own) for n in range(10)]
            groups = await world.step()
        metrics = world.source.metrics()
        assert metrics["generate/num_retried_rollouts"] == 1
        lost = len(killed) - 1
        assert metrics["generate/num_failed_rollouts"] == lost and sum(len(g.samples) for g in groups) == 8 - lost

    skyrl_gym.register(id="workers", entry_point=WithAWorker)
    try:
        asyncio.run(main())
    finally:
        skyrl_gym.registry.pop("workers")


async def leg(
    number: int, saved: tuple[Any, bytes] | None, *overrides: str, play: Play = slowly, **kwargs: Any
) -> tuple[World, list[list[Group]], tuple[Any, bytes]]:
    """Some steps of a run from a checkpoint; it is then killed."""
    world = World("trainer.max_staleness=3", "trainer.pipeline_depth=2", *overrides, play=play, num_rows=80, **kwargs)
    if saved is not None:
        world.version = saved[0].get("policy_version", 2 * saved[0]["step"])
        world.source.restore(*saved)
    steps = [await world.step(update_s=0.002) for _ in range(number)]
    state, groups = world.source.snapshot()
    await world.source.close()
    return world, steps, (json.loads(json.dumps(state)), groups)


def test_a_resumed_run_repeats_and_skips_nothing():
    """Killed after each of several steps: finished groups are trained first, as they were; rows in flight start again,
    and the others follow in their order."""

    async def main() -> None:
        trained, ready, saved, generated = list[str](), list[Group](), None, 0
        for number in (1, 2, 3, 1, 3):
            world, steps, saved = await leg(number, saved)
            trained += [uid for step in steps for uid in uids(step)]
            first = [group for step in steps for group in step][: len(ready)]
            assert uids(first) == uids(ready)[: len(first)]
            for before, after in zip(ready, first, strict=False):
                assert before.prompt is not after.prompt and before.prompt == after.prompt
                assert_equal(before, after)
            ready = [each.item for _, each in sorted(world.source._buffer.ready.items())]
            state = saved[0]
            taken = trained + uids(ready) + [uid for uid, _ in state["pending"]]
            assert state["step"] * 4 == len(trained) and len(taken) - len(trained) == 8
            assert len(set(taken)) == len(taken) == state["order"]["position"], "each row of the epoch once"
            assert state["ledger"] == {
                "generated": len(trained) + len(ready), "waiting": len(ready), "trained": len(trained),
                "filtered": 0, "failed": 0, "cancelled": 0,
            }  # fmt: skip
            generated += sum(world.calls.values())
        assert ready, "something has waited"
        assert 2 * len(trained) <= generated < 2 * (len(trained) + 8 * 5), "what waited was not generated again"

    asyncio.run(main())


def assert_equal(before: Group, after: Group) -> None:
    for one, other in zip((*before.samples, *before.greedy), (*after.samples, *after.greedy), strict=True):
        for name in (field.name for field in fields(Sample)):
            mine, theirs = getattr(one, name), getattr(other, name)
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == theirs.dtype
                mine, theirs = mine.tolist(), theirs.tolist()
            assert mine == theirs, name


def test_a_saved_group_is_the_group_bit_for_bit():
    trace = Trace()
    trace.read([4, 2**31 - 1], [{"role": "user", "content": "ä\n"}])
    trace.write(Generation([6, 7], [-0.1, -1e-30], "6", "stop", 3, ((3, 1), (5, 1))))
    trace.add_reward(0.1 + 0.2, {"style": 1 / 3})
    sample = trace.to_sample({"turns": np.float64(0.1), "won": True, "tool": "cat"})
    unknown = replace(sample, policy_version=UNKNOWN_VERSION, version_spans=())
    group = Group(prompt("3"), (sample, unknown), (sample,))
    data = to_bytes([SavedGroup(group, epoch=2, started=5, finished=6)] * 2)
    prompts = {"3": prompt("3")}
    (read, _) = from_bytes(data, prompts)
    assert_equal(group, read.group)
    assert (read.epoch, read.started, read.finished, read.group.prompt) == (2, 5, 6, prompts["3"])
    (shifted, _) = from_bytes(data, prompts, newer=-2)
    assert [s.policy_version for s in shifted.group.samples] == [1, UNKNOWN_VERSION]
    assert shifted.group.samples[0].version_spans == ((1, 1), (3, 1))


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"", lambda data: data[:8] + b"x" + data[9:]])
def test_saved_groups_that_cannot_be_read_say_what_to_do(damage: Callable[[bytes], bytes]):
    group = Group(prompt("3"), (sample(1.0), sample(0.0)))
    data = to_bytes([SavedGroup(group, 0, 0, 0)])
    with pytest.raises(ValueError, match=r"cannot be read \(.*Resume from another checkpoint"):
        from_bytes(damage(data), {"3": prompt("3")})
    with pytest.raises(ValueError, match=r"KeyError: '3'.*with the data .* that wrote it"):
        from_bytes(data, {})


def test_environment_metrics_that_are_not_json_are_generated_again(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        world = World()
        await world.step()
        for number, each in world.source._buffer.ready.items():
            samples = tuple(replace(one, env_metrics={"tool": object()}) for one in each.item.samples)
            world.source._buffer.ready[number] = replace(each, item=replace(each.item, samples=samples))
        state, data = world.source.snapshot()
        await world.source.close()
        assert data == b"" and len(state["pending"]) == 4 and "generates them again" in caplog.text
        resumed = World()
        resumed.source.restore(state, data)
        assert resumed.source._admission.ledger == Ledger(generated=4, trained=4)

    asyncio.run(main())


def test_the_staleness_of_restored_groups_is_that_of_their_tokens():
    """The policy's versions may begin lower after a restart, because failed syncs use up numbers."""

    async def main() -> None:
        _, _, (state, data) = await leg(3, None, play=at_once)
        assert data
        state["policy_version"] += 7
        state["steps"] = [[version + 7, step] for version, step in state["steps"]]
        saved = from_bytes(data, {str(n): prompt(str(n)) for n in range(80)}, 7)
        resumed = World("trainer.max_staleness=3", "trainer.pipeline_depth=2", num_rows=80)
        resumed.version = 6
        resumed.source.restore(state, to_bytes(saved))
        groups = await resumed.step()
        assert {version for group in groups for one in group.samples for version, _ in one.version_spans} <= {0, 2, 4}
        assert resumed.source.metrics()["async/staleness_max"] == 2
        await resumed.source.close()

    asyncio.run(main())


def test_a_lower_bound_generates_what_is_too_old_again(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        _, _, saved = await leg(3, None, play=at_once)
        resumed = World("trainer.max_staleness=0", num_rows=80)
        resumed.version = saved[0]["policy_version"]
        resumed.source.restore(*saved)
        assert "8 finished groups of the checkpoint are too old for trainer.max_staleness=0" in caplog.text
        ledger = resumed.source._admission.ledger
        assert ledger == Ledger(generated=12, trained=12)
        steps = [await resumed.step() for _ in range(2)]
        assert [uid for step in steps for uid in uids(step)] == [uid for uid, _ in resumed_rows(saved)]
        await resumed.source.close()

    asyncio.run(main())


def resumed_rows(saved: tuple[Any, bytes]) -> list[tuple[str, int]]:
    """Rows of finished groups and of those in flight."""
    groups = from_bytes(saved[1], {str(n): prompt(str(n)) for n in range(80)})
    return [(each.group.prompt.uid, each.epoch) for each in groups] + saved[0]["pending"]


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0, "position": 4, "num_rows": 10, "seed": 42}, {"order": {"file": 3}, "pending": []}]
)
def test_a_state_that_is_not_its_own_is_refused(state: dict[str, Any]):
    with pytest.raises(ValueError, match=r"Set trainer.source, and .*, as there"):
        World().source.resume(state)


OWN_SOURCE = ["trainer.source=skyrl_train.rollout.source:OnPolicySource"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.pipeline_depth=2"], "more batches ahead than trainer.max_staleness 1 allows"),
        (["trainer.source=on_policy", "trainer.max_staleness=2"], "with trainer.source=on_policy no sample is stale"),
        (["trainer.algorithm.dynamic_sampling.type=replace"], "no group needs a copy"),
        (["trainer.algorithm.corrections=[]"], "older weights, which neither regular nor a correction accounts for"),
        (["trainer.algorithm.corrections=[opsm]"], "accounts for"),
        (["trainer.max_staleness=0", LOGLINEAR], "loglinear and no sample is stale: .* Set it to recompute"),
        (["trainer.source=on_policy", LOGLINEAR], "loglinear and no sample is stale"),
        ([*OWN_SOURCE, LOGLINEAR], "loglinear and no sample is stale"),
        ([f"{LORA}.rank=4", f"{LORA}.dropout=0.1", LOGLINEAR], "would contain dropout noise"),
        (["trainer.algorithm.use_kl_loss=false", CORRECTED_KL], "there is no such term. Set it to false"),
        (["trainer.source=on_policy", CORRECTED_KL], "there is no correction"),
        ([*KL_REWARD, LOGLINEAR], "the penalty needs the forward pass"),
        (["trainer.algorithm.policy_loss_type=kl_cov", LOGLINEAR], "selects tokens by values that only a"),
    ],
)
def test_a_configuration_that_cannot_stream_is_refused(overrides: list[str], problem: str):
    with pytest.raises(ConfigError, match=problem):
        check(load_config([*CONFIG, *overrides]), 10, files=False)


def test_stale_samples_have_a_correction_by_default():
    def corrections(*overrides: str) -> tuple[str, ...]:
        return load_config([*CONFIG, *overrides]).trainer.algorithm.corrections

    assert corrections() == ("token_tis",)
    assert corrections("trainer.max_staleness=0") == () == corrections("trainer.source=on_policy")
    assert corrections("trainer.algorithm.policy_loss_type=dppo") == (), "its ratio is to the engine"
    assert corrections("trainer.algorithm.corrections=[icepop]") == ("icepop",)


def test_the_console_shows_staleness_and_who_waits():
    async def main() -> dict[str, float]:
        world = World()
        for _ in range(3):
            await world.step()
        await world.source.close()
        metrics: dict[str, float] = world.source.metrics()
        return metrics

    metrics = asyncio.run(main())
    assert re.fullmatch(r"trainer waited \d+ %, engines idle \d+ %, staleness 1.0 \(max 1\)", waiting_line(metrics))
    assert waiting_line({"async/staleness_mean": 0.94, "async/staleness_max": 2.0}) == "staleness 0.9 (max 2)"
    assert waiting_line({}) == ""


def test_more_samples_than_engines_can_generate_are_warned_of(caplog: pytest.LogCaptureFixture):
    World("generator.max_num_seqs=8")
    assert not caplog.records
    World("generator.max_num_seqs=7")
    assert "16 samples may be in flight, and the engines generate 7 at a time" in caplog.text


def test_finished_groups_without_the_greedy_response_that_is_now_needed_are_generated_again(
    caplog: pytest.LogCaptureFixture,
):
    async def main() -> None:
        _, _, (state, data) = await leg(3, None, play=at_once)
        assert data
        resumed = World("trainer.max_staleness=3", "trainer.pipeline_depth=2", num_rows=80)
        resumed.source._parts = replace(resumed.source._parts, with_greedy=True)
        resumed.version = state["policy_version"]
        resumed.source.restore(state, data)
        assert not resumed.source._buffer.ready and "lack a greedy response and are generated again" in caplog.text
        assert all(group.greedy for group in await resumed.step())
        await resumed.source.close()

    asyncio.run(main())


def test_a_row_that_the_data_no_longer_has_is_named():
    async def main() -> None:
        _, _, (state, _) = await leg(3, None, play=at_once)
        state["pending"] = [["no row", 0]]
        with pytest.raises(ValueError, match="the checkpoint names the row no row, which is not among this run's"):
            World("trainer.max_staleness=3", "trainer.pipeline_depth=2", num_rows=80).source.restore(state, b"")

    asyncio.run(main())
