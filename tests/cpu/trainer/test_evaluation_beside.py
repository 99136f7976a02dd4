"""Evaluation beside training, and the end of a run that gets no groups: a real Trainer, source and router of tasks
around an engine that is a semaphore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import PretrainedConfig

from skyrl_train.checks.rl import check
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.policy_group import NoStepTaken
from skyrl_train.config import ConfigError, load_config
from skyrl_train.entrypoints import experiment
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.file_sum import FileSum, sum_of
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, RolloutFailure
from skyrl_train.rollout.source import OnPolicySource, SourceParts
from skyrl_train.rollout.streaming.streaming import StreamingSource
from skyrl_train.rollout.streaming.watchdog import NoProgress
from skyrl_train.rollout.trace import Trace
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.evaluation import Evaluation, EvaluationBeside
from skyrl_train.trainer.run_state import Checkpoints, load_checkpoint
from skyrl_train.trainer.trainer import Parts, Trainer
from skyrl_train.types import UNKNOWN_VERSION, Generation, Group, Metrics, Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, engines_of, prompt, sample
from tests.support.tiny import chatml_tokenizer

CONFIG = [
    "trainer.train_batch_size=2",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "trainer.source=streaming",
    "trainer.log_samples_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=2",
    "trainer.hf_save_interval=0",
]
NUM_HELD_OUT = 6


async def nothing(*args: Any) -> None:
    """A phase of the devices."""


class Weights:
    """An adaptive weight of the objective."""

    def __init__(self) -> None:
        self.state = {"kl": 0.1}

    def resume(self, state: dict[str, float]) -> None:
        self.state = dict(state)


class World:
    """A run whose engine answers one request at a time, each after one or two rounds of the event loop."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        num_steps: int = 6,
        fails: Callable[[World, str], bool] = lambda world, uid: False,
    ) -> None:
        config = load_config([*CONFIG, f"trainer.run_dir={folder}", *overrides])
        self.loads: list[int] = []
        """Versions that the reserved engines have loaded."""
        self.version, self.num_steps, self.slot = 0, 0, asyncio.Semaphore(1)
        self.rows: dict[int, Metrics] = {}
        self.gate = asyncio.Event()
        """Held-out prompts from the third on wait for it."""
        self.gate.set()

        async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
            trace, first = Trace(), self.version
            trace.read([4, 5])
            if prompt.uid.startswith("held") and int(prompt.uid[-1]) >= 2:
                await self.gate.wait()
                first = self.loads[-1] if self.loads else self.version
            async with self.slot:
                for _ in range(2 if prompt.uid.startswith("held") else 1):
                    await asyncio.sleep(0)
                if fails(self, prompt.uid):
                    raise KeyError("no sandbox")
            trace.write(Generation([6, 7], [-1.0] * 2, "6", "stop", first))
            trace.add_reward(float(len(prompt.uid) % 2))
            return trace.to_sample()

        collector, timers = Collector(rollout, engines_of(None)), Timers()
        kind = OnPolicySource if config.trainer.source == "on_policy" else StreamingSource
        self.source = kind(
            SourceParts(
                config=config,
                prompts=[prompt(str(n)) for n in range(40)],
                sampling_params=SamplingParams(max_generate_length=4),
                collector=collector,
                progress=Quiet(),
                timers=timers,
                wake_engines=nothing,
                policy_version=lambda: self.version,
                num_steps=num_steps,
            )
        )
        evaluation = Evaluation(
            [prompt(f"held {n}") for n in range(NUM_HELD_OUT)],
            collector,
            Quiet(),
            n_samples=1,
            sampling_params=SamplingParams(max_generate_length=4),
            batch_size=2,
            max_failed_share=0.0,
            pass_threshold=0.0,
        )
        self.evaluation, self.groups = evaluation, list[Group]()
        self.trained = list[list[str]]()
        """Uids of each step's groups."""
        self.coefficients, self.is_running, self.answers = Weights(), True, True
        step: Any = SimpleNamespace(
            source=self.source,
            policy=self,
            policy_version=0,
            timers=timers,
            critic=None,
            groups=(),
            has_begun=False,
            coefficients=self.coefficients,
            residency=SimpleNamespace(for_rollout=nothing, for_checkpoint=nothing, for_saving=nothing),
        )

        async def train() -> Metrics:
            step.has_begun = False
            step.groups = await self.source.next()
            self.trained.append([group.prompt.uid for group in step.groups])
            await self.before_update()
            step.has_begun = True
            await self.update()
            self.version += 1
            self.num_steps += 1
            return self.source.metrics()

        self.update: Callable[[], Awaitable[None]] = nothing
        self.before_update: Callable[[], Awaitable[None]] = nothing
        """Credit and scores of a step that has its groups."""
        step.step = train
        load = {"load_weights": self.load} if config.generator.eval_num_engines else {}
        beside = EvaluationBeside(evaluation, lambda: self.version, **load)
        self.trainer = Trainer(config, Parts(step, evaluation, beside, Tracker([self]), None), num_steps)  # type: ignore[arg-type]

    @property
    def policy_version(self) -> int:
        return self.version

    async def load(self) -> None:
        self.loads.append(self.version)

    async def is_idle(self) -> bool:
        return self.answers

    async def copy_state(self, folder: str) -> list[FileSum]:
        Path(folder, "rank_0.pt").write_text("state")
        return [sum_of(Path(folder, "rank_0.pt"))]

    def log(self, step: int, metrics: Metrics) -> None:
        self.rows[step] = self.rows.get(step, {}) | metrics

    def close(self) -> None:
        """Like a sink's."""

    def run(self, timeout_s: float = 60) -> None:
        asyncio.run(asyncio.wait_for(self.trainer.train(), timeout_s))

    @property
    def evaluated(self) -> dict[int, float | None]:
        """Step of the row -> steps since the evaluation began; None if training waited for it."""
        return {s: row.get("eval/lag_steps") for s, row in self.rows.items() if "eval/all/avg_score" in row}


NEVER = "trainer.ckpt_interval=-1"


def test_training_continues_during_an_evaluation_and_the_log_says_whose_answers_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The evaluation of step 2 needs the weights of 2 and 3; that of step 4 comes due in the meantime."""
    caplog.set_level(logging.INFO)
    world = World(tmp_path, NEVER, num_steps=8)
    world.gate.clear()

    async def update() -> None:
        if world.version == 4:
            world.gate.set()
            for _ in range(60):
                await asyncio.sleep(0)

    world.update = update
    world.run()
    assert world.evaluated[5] == 3 and world.evaluated[8] is None and not {2, 3, 4} & set(world.evaluated)
    assert "skipped the evaluation of step 4: that of step 2 is still running" in caplog.text
    row = world.rows[5]
    assert row["eval/policy_version"] == 2 and row["eval/share_of_version"] == pytest.approx(1 / 3)
    assert row["timing/eval"] > 0 and "timing/eval" not in world.rows[4]
    assert world.source._admission.ledger.trained == 16


def test_reserved_engines_keep_the_version_of_an_evaluation_until_the_next_one_begins(tmp_path: Path):
    """As above, but for the engines; the evaluation of step 8 is made by those of training, which waits."""
    world = World(tmp_path, NEVER, "generator.num_inference_engines=2", "generator.eval_num_engines=1", num_steps=8)
    world.gate.clear()

    async def update() -> None:
        if world.version == 4:
            world.gate.set()
            for _ in range(60):
                await asyncio.sleep(0)

    world.update = update
    world.run()
    assert world.loads == [2, 6], "not while the evaluation of step 2 runs, at step 4"
    assert world.rows[5]["eval/policy_version"] == 2 and world.rows[5]["eval/share_of_version"] == 1.0


@pytest.mark.parametrize(
    "overrides", [["trainer.max_staleness=4"], ["trainer.max_staleness=0"], ["trainer.pipeline_depth=0"]]
)
def test_rollouts_and_an_evaluation_that_share_one_place_never_wait_for_each_other(
    overrides: list[str], tmp_path: Path
):
    """prime-rl #1671: each waited for a place that the other had."""
    world = World(
        tmp_path, NEVER, "trainer.eval_interval=1", "trainer.eval_beside_training=true", *overrides, num_steps=12
    )
    world.run()
    assert sorted(world.rows) == list(range(1, 13)) and world.evaluated[12] is None
    assert len(world.evaluated) >= 2 and all(lag is None or lag >= 1 for lag in world.evaluated.values())


@pytest.mark.parametrize(
    "overrides", [["trainer.source=on_policy"], ["trainer.max_staleness=0"], ["trainer.eval_beside_training=false"]]
)
def test_training_waits_where_a_score_is_to_be_of_one_version(overrides: list[str], tmp_path: Path):
    world = World(tmp_path, NEVER, *overrides)
    world.run()
    assert world.evaluated == {2: None, 4: None, 6: None}
    assert not [key for row in world.rows.values() for key in row if key in ("eval/share_of_version", "eval/lag_steps")]


def test_an_evaluation_that_fails_ends_the_run_with_its_error(tmp_path: Path):
    world = World(tmp_path, NEVER, fails=lambda world, uid: uid == "held 3")
    with pytest.raises(RolloutFailure, match="KeyError: 'no sandbox'"):
        world.run()
    assert 3 <= max(world.rows) <= 6


@pytest.mark.parametrize("fails", [False, True], ids=["with a score", "with an error"])
def test_an_evaluation_that_ends_with_the_last_step_is_not_dropped_in_silence(
    fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The evaluation of step 2 ends while step 3, the last one, is trained."""
    fault = {"fails": lambda world, uid: uid == "held 3" and world.version < 3} if fails else {}
    own = ["trainer.ckpt_interval=100", "trainer.eval_interval=2"]
    world = World(tmp_path, *own, num_steps=3, **fault)

    async def waits() -> None:
        if world.version == 2:
            world.trainer._export_sum = "of step 2"
            while not world.trainer._parts.beside._running.task.done():
                await asyncio.sleep(0)

    world.update = waits
    with caplog.at_level(logging.INFO):
        if fails:
            with pytest.raises(RolloutFailure, match="KeyError: 'no sandbox'"):
                world.run()
            state = load_checkpoint(tmp_path / "checkpoints/global_step_3").state
            assert state.pending and state.export is None, "step 3 was not exported"
        else:
            world.run()
            assert world.evaluated == {3: None}
            assert "the evaluation of step 2 ended with avg_score" in caplog.text


def test_an_evaluation_that_the_checkpoint_overtakes_is_made_again_on_resume(tmp_path: Path):
    world = World(tmp_path, "trainer.ckpt_interval=2", "trainer.max_ckpts_to_keep=-1")
    world.run()
    states = {c.state.global_step: c for c in Checkpoints(str(tmp_path / "checkpoints"), -1).all()}
    assert states[2].state.pending and not states[6].state.pending
    resumed = World(tmp_path / "resumed", NEVER, num_steps=20)
    resumed.version = resumed.num_steps = 2
    resumed.trainer.resume(states[2])
    resumed.run()
    first = min(resumed.evaluated)
    assert resumed.rows[first]["eval/policy_version"] == 2 and resumed.evaluated[first] == first - 2


@pytest.mark.parametrize("source", ["streaming", "on_policy"])
def test_a_run_that_gets_no_groups_ends_with_a_checkpoint_from_which_it_continues(source: str, tmp_path: Path):
    own = [f"trainer.source={source}", "trainer.eval_interval=-1", "trainer.ckpt_interval=100"]
    world = World(tmp_path, *own, fails=lambda world, uid: world.version == 3)
    with pytest.raises(RolloutFailure, match="KeyError: 'no sandbox'"):
        world.run()
    checkpoint = load_checkpoint(tmp_path / "checkpoints/global_step_3")
    resumed = World(tmp_path / "resumed", *own)
    resumed.version = resumed.num_steps = 3
    resumed.trainer.resume(checkpoint)
    resumed.run()
    assert sorted(resumed.rows) == [4, 5, 6]
    order = (resumed.source.state if source == "on_policy" else resumed.source.state["order"])["position"]
    assert order == 12, "no row was skipped"


@pytest.mark.parametrize("share", ["true", "false"], ids=["shared devices", "own devices"])
@pytest.mark.parametrize("source", ["streaming", "on_policy"])
def test_a_step_that_fails_before_its_update_loses_no_step_and_no_group(source: str, share: str, tmp_path: Path):
    """Such as an estimator that raises: the resumed run has the groups of the failed step first."""
    own = [f"trainer.source={source}", "trainer.eval_interval=-1", "trainer.ckpt_interval=100"]
    own += [f"trainer.placement.colocate_all={share}"]
    world = World(tmp_path, *own)

    async def credit() -> None:
        world.coefficients.state["kl"] = 0.1 + world.version  # as a penalty does before the update
        if world.version == 3:
            raise ValueError("mine")

    world.before_update = credit
    with pytest.raises(ValueError, match="mine"):
        world.run()
    assert world.source._admission.ledger.trained == (8 if source == "on_policy" else 6)
    checkpoint = load_checkpoint(tmp_path / "checkpoints/global_step_3")
    assert checkpoint.state.coefficients == {"kl": 2.1}, "those before the step"
    resumed = World(tmp_path / "resumed", *own)
    resumed.version = resumed.num_steps = 3
    resumed.trainer.resume(checkpoint)
    resumed.run()
    assert sorted(resumed.rows) == [4, 5, 6]
    assert resumed.trained[0] == world.trained[3], "the failed step again"
    uids = [uid for step in world.trained[:3] + resumed.trained for uid in step]
    assert len(uids) == len(set(uids)) == 12, "no row was lost or trained twice"


@pytest.mark.parametrize(
    ("answers", "share", "is_saved"), [(True, "false", True), (False, "false", False), (True, "true", False)]
)
def test_a_process_that_fails_before_the_update_allows_a_checkpoint_where_the_policy_answers(
    answers: bool, share: str, is_saved: bool, tmp_path: Path
):
    own = ["trainer.eval_interval=-1", "trainer.ckpt_interval=100", f"trainer.placement.colocate_all={share}"]
    world = World(tmp_path, *own)

    async def score() -> None:
        if world.version == 3:
            world.answers = answers
            raise RemoteFailed("reference-0: out of memory")

    world.before_update = score
    with pytest.raises(RemoteFailed, match="out of memory"):
        world.run()
    assert (tmp_path / "checkpoints/global_step_3/checkpoint.json").exists() == is_saved


@pytest.mark.parametrize("share", ["true", "false"], ids=["shared devices", "own devices"])
def test_an_update_that_fails_before_any_optimizer_step_loses_no_step(share: str, tmp_path: Path):
    """Such as a loss that raises; on shared devices the policy has them, and nothing moves."""
    own = ["trainer.eval_interval=-1", "trainer.ckpt_interval=100", f"trainer.placement.colocate_all={share}"]
    world = World(tmp_path, *own)

    async def update() -> None:
        if world.version == 3:
            world.trainer._parts.step.has_begun = False  # as `TrainingStep` does for this error
            raise NoStepTaken("policy-0: my loss raised")

    world.update = update
    with pytest.raises(NoStepTaken, match="my loss"):
        world.run()
    assert load_checkpoint(tmp_path / "checkpoints/global_step_3").state.global_step == 3


class KeepsNothing(StreamingSource):
    roll_back = None  # type: ignore[assignment]


class KeepsHalf(StreamingSource):
    def roll_back(self) -> None:
        raise KeyError("half of them")


@pytest.mark.parametrize("kind", [KeepsNothing, KeepsHalf])
def test_a_source_that_holds_groups_and_cannot_take_them_back_is_not_saved_without_them(
    kind: type[StreamingSource], tmp_path: Path
):
    world = World(tmp_path, "trainer.eval_interval=-1", "trainer.ckpt_interval=100")

    async def credit() -> None:
        if world.version == 3:
            raise ValueError("mine")

    world.before_update = credit
    world.source.__class__ = kind
    with pytest.raises(ValueError, match="mine"):
        world.run()
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_fails_during_the_update_writes_no_checkpoint_of_half_an_update(tmp_path: Path):
    world = World(tmp_path, "trainer.eval_interval=-1", "trainer.ckpt_interval=100")

    async def update() -> None:
        if world.version == 3:
            raise KeyError("the update")

    world.update = update
    with pytest.raises(KeyError, match="the update"):
        world.run()
    assert not (tmp_path / "checkpoints").exists()


def test_evaluating_beside_a_synchronous_run_is_refused():
    overrides = [*CONFIG, "trainer.source=on_policy", "trainer.eval_beside_training=true"]
    with pytest.raises(ConfigError, match="only with streaming can training continue during"):
        check(load_config(overrides), 10, files=False)


def test_an_evaluation_of_a_streaming_run_that_stalls_ends_it(monkeypatch: pytest.MonkeyPatch):
    async def hangs(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        await asyncio.sleep(100)
        raise AssertionError

    def parts(shared: str) -> Parts:
        run: Any = object.__new__(Experiment)
        overrides = ["trainer.source=streaming", "trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1"]
        run.config = load_config([*overrides, f"trainer.placement.colocate_all={shared}"])
        run.tokenizer, run.model_config, run.hints = chatml_tokenizer(), PretrainedConfig(), None
        run._console = Console(quiet=True)
        run.train_prompts = run.val_prompts = [prompt("a")]
        assembly: Any = SimpleNamespace(
            with_greedy=False, residency=SimpleNamespace(for_rollout=None), step=lambda *args, **kwargs: None
        )
        monkeypatch.setattr(experiment, "Assembly", lambda *args: assembly)
        monkeypatch.setattr(experiment, "deadline_s", lambda config, num_attempts: 0.1)
        monkeypatch.setattr(Experiment, "num_steps", 1)
        engines = SimpleNamespace(generate=None)
        processes: Any = SimpleNamespace(engines=engines, eval_engines=None, policy=SimpleNamespace(policy_version=0))
        made: Parts = run._parts(processes, hangs, None, SimpleNamespace(evaluation=None))
        return made

    async def beside_training(evaluation: Evaluation) -> None:
        async def train() -> None:
            while True:
                evaluation.collector.requests._others.note_progress()  # type: ignore[union-attr]
                await asyncio.sleep(0.01)

        training = asyncio.create_task(train())
        try:
            await evaluation.sample(1, Quiet())
        finally:
            training.cancel()

    made = parts("false")
    for evaluation in (made.evaluation, made.beside._evaluation):
        with pytest.raises(NoProgress):
            asyncio.run(beside_training(evaluation))
    frozen = parts("true")  # by each update, for as long as that takes
    assert frozen.evaluation.collector.deadline_s == 0.1 and frozen.beside._evaluation.collector.deadline_s is None


def test_an_evaluation_of_unknown_versions_has_no_share_of_its_own():
    async def unknown(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        return replace(sample(1.0), policy_version=UNKNOWN_VERSION, version_spans=())

    async def main() -> Metrics:
        collector = Collector(unknown, engines_of(None))
        params = SamplingParams(max_generate_length=4)
        beside = EvaluationBeside(Evaluation([prompt("a")], collector, Quiet(), 1, params, 2, 0.0, 0.0), lambda: 2)
        await beside.begin(1, seed=1)
        while not (metrics := beside.ended(2)):
            await asyncio.sleep(0)
        return metrics

    metrics = asyncio.run(main())
    assert metrics["eval/lag_steps"] == 1 and "eval/share_of_version" not in metrics


def test_an_evaluation_zeroes_rewards_of_unfinished_samples_if_it_is_asked_to():
    async def unfinished(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        return replace(sample(1.0), stop_reason="length")

    def score(*overrides: str) -> float:
        run: Any = object.__new__(Experiment)
        run.config, run._console, run.val_prompts = load_config([*overrides]), Console(quiet=True), [prompt("a")]
        samples: Any = SimpleNamespace(evaluation=lambda *args: ())
        evaluation = run.get_evaluation(Collector(unfinished, engines_of(None)), samples)
        return asyncio.run(evaluation.run(seed=1, step=1))["eval/all/avg_score"]

    assert score("generator.zero_reward_on_non_stop=true") == 0 and score() == 1


def test_an_evaluation_counts_the_rollouts_that_failed():
    async def all_but_b(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        if prompt.uid == "b":
            raise KeyError("no sandbox")
        return sample(1.0)

    collector, params = Collector(all_but_b, engines_of(None)), SamplingParams(max_generate_length=4)
    prompts = [prompt(uid) for uid in "abc"]
    evaluation = Evaluation(prompts, collector, Quiet(), 2, params, 3, max_failed_share=0.5, pass_threshold=0.0)
    metrics = asyncio.run(evaluation.run(seed=1, step=1))
    assert metrics["eval/all/num_failed_rollouts"] == 2 and metrics["eval/all/avg_score"] == 1

    async def two(prompt: Prompt, params: SamplingParams, engines: Engines) -> list[Sample]:
        return [sample(1.0), await all_but_b(prompt, params, engines)]

    several = replace(evaluation, collector=Collector(two, engines_of(None)))
    assert asyncio.run(several.run(seed=1, step=1))["eval/all/num_failed_rollouts"] == 2
    strict = replace(evaluation, prompts=prompts[:1], max_failed_share=0.0)
    assert "eval/all/num_failed_rollouts" not in asyncio.run(strict.run(seed=1, step=1))
