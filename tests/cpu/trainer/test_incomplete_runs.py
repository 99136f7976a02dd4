"""A run that could not do what was asked of it does not end as if it had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.config.sft import load_sft_config
from skyrl_train.entrypoints.resume import lock_checkpoints
from skyrl_train.entrypoints.run import Run
from skyrl_train.tracking.jsonl import JsonLinesWriter
from skyrl_train.tracking.run_dir import HeldFolder, create_run_dir
from skyrl_train.trainer.problems import END_AFTER, Anomalies, RunIncomplete, SkippedUpdates
from skyrl_train.trainer.run_state import Checkpoints, load_checkpoint
from skyrl_train.types import Metrics
from tests.support.counting import Counting, steps, trainer_config

FULL = RemoteFailed("policy-0: No space left on device")


def updates(num_steps: int, num_skipped: int) -> Metrics:
    return {"policy/num_optimizer_steps": float(num_steps), "policy/num_skipped_steps": float(num_skipped)}


def test_an_export_that_fails_costs_itself_and_is_written_at_the_next_interval(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    loop = Counting(trainer_config(tmp_path, "trainer.hf_save_interval=2"), 5)
    loop.policy.export_errors = {2: FULL}
    logged: dict[int, Metrics] = {}
    loop._tracker.log = lambda step, metrics: logged.update({step: dict(metrics)})  # type: ignore[method-assign]
    asyncio.run(loop.train())
    assert loop.policy.exported == ["global_step_4", "global_step_5"]
    assert "the export of step 2 could not be written, the run continues: policy-0: No space" in caplog.text
    failed = {step: one["trainer/export_failed"] for step, one in logged.items() if "trainer/export_failed" in one}
    assert failed == {2: 1.0, 4: 0.0, 5: 0.0}


@pytest.mark.parametrize(("interval", "exported"), [(2, [2, 4, 5]), (-1, [5]), (0, [])])
def test_a_run_ends_with_a_model_unless_it_is_configured_not_to(interval: int, exported: list[int], tmp_path: Path):
    loop = Counting(trainer_config(tmp_path, f"trainer.hf_save_interval={interval}", "trainer.ckpt_interval=3"), 5)
    assert loop.exported is None and loop.newest_checkpoint is None
    asyncio.run(loop.train())
    assert loop.policy.exported == [f"global_step_{step}" for step in exported]
    assert loop.exported == (tmp_path / "run/exports/global_step_5" if exported else None)
    assert loop.newest_checkpoint == tmp_path / "run/checkpoints/global_step_5"


class Killed(BaseException):
    """Nothing is cleaned up after it."""


@pytest.mark.parametrize(("dies_in", "saved"), [("log", 1), ("finish", 1), ("_note_folders", 2)])
def test_the_metrics_of_each_step_are_logged_wherever_the_driver_is_killed(dies_in: str, saved: int, tmp_path: Path):
    """Before the row of step 2, between it and the record of the checkpoint of that step, or after both."""
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1", "trainer.eval_before_train=false")
    logged: list[int] = []

    def started() -> Counting:
        loop = Counting(trainer, 4)
        loop._tracker.log = lambda step, _: logged.append(step)  # type: ignore[method-assign]
        return loop

    killed, resumed = started(), started()
    owner: Any = {"log": killed._tracker, "finish": killed._checkpoints}.get(dies_in, killed)
    works = getattr(owner, dies_in)

    def dies(*given: Any) -> None:
        if killed.global_step == 2 and (dies_in != "_note_folders" or killed._saved_step == 2):
            raise Killed
        works(*given)

    setattr(owner, dies_in, dies)
    with pytest.raises(Killed):
        asyncio.run(killed.train())
    newest = Checkpoints(trainer.ckpt_path, -1).newest_intact()
    assert newest is not None and newest.state.global_step == saved
    resumed.resume(newest)
    asyncio.run(resumed.train())
    assert sorted({*logged}) == [1, 2, 3, 4] and steps(trainer) == [1, 2, 3, 4]


def test_a_stopped_run_whose_checkpoint_cannot_be_written_does_not_name_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    loop = Counting(trainer_config(tmp_path, "trainer.ckpt_interval=10"), 5, stop_at=2)
    loop.policy.error = OSError(28, "No space left on device")
    asyncio.run(loop.train())
    assert "the checkpoint of step 2 could not be written: [Errno 28] No space left on device" in caplog.text
    assert loop.newest_checkpoint is None and loop.global_step == 2


def test_without_its_last_export_a_run_saves_all_else_and_ends_with_an_error(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.hf_save_interval=2", "trainer.ckpt_interval=3")
    loop = Counting(trainer, 4)
    loop.policy.export_errors = {4: FULL}
    with pytest.raises(RunIncomplete, match="the export of step 4, the last one, could not be written: policy-0: No"):
        asyncio.run(loop.train())
    assert steps(trainer) == [3, 4] and loop.evaluated[-1] == 4
    resumed = Counting(trainer, 4)
    resumed.resume(load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(4)))
    asyncio.run(resumed.train())
    assert resumed.policy.exported == ["global_step_4"] and not resumed.batches, "the same command makes up for it"


def test_an_export_on_ranks_that_cannot_train_on_ends_the_run(tmp_path: Path):
    loop = Counting(trainer_config(tmp_path, "trainer.hf_save_interval=2"), 4)
    loop.policy.export_errors, loop.policy.answers = {2: FULL}, False
    with pytest.raises(RemoteFailed, match="No space left"):
        asyncio.run(loop.train())
    assert loop.global_step == 2


def test_a_run_whose_every_update_was_skipped_fails_and_writes_no_checkpoint_of_it(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=2")
    loop = Counting(trainer, 4)
    loop.metrics = updates(2, 2)
    with pytest.raises(RunIncomplete, match="was not trained: the updates of all 4 steps were skipped, because their"):
        asyncio.run(loop.train())
    assert steps(trainer) == [], "or the next start would say that all steps are done"


def test_a_run_with_some_skipped_updates_finishes(tmp_path: Path):
    loop = Counting(trainer_config(tmp_path), 4)
    loop.metrics = updates(2, 1)
    asyncio.run(loop.train())
    assert loop.global_step == 4


def test_updates_skipped_for_long_are_warned_of_and_then_end_the_run_with_what_was_trained_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1000", "trainer.max_ckpts_to_keep=-1")
    loop = Counting(trainer, 100)
    loop.after_step = lambda: setattr(loop, "metrics", updates(1, int(loop.policy.num_steps > 5)))
    with pytest.raises(RunIncomplete, match="ended early: the updates of the last 10 steps were skipped"):
        asyncio.run(loop.train())
    assert loop.global_step == 5 + END_AFTER and steps(trainer) == [15]
    assert caplog.text.count("the updates of 3 consecutive steps were skipped") == 1


def test_steps_without_an_update_and_single_skipped_ones_are_no_sign_of_trouble():
    skipped = SkippedUpdates()
    for step in range(2 * END_AFTER):
        skipped.count(step, updates(0, 0))
    assert skipped.problem is None
    for step in range(4 * END_AFTER):
        skipped.count(step, updates(1, step % 2))
    assert skipped.problem is None and not skipped.is_stuck


@pytest.mark.parametrize("version", [0, 3])
def test_a_resumed_run_whose_only_update_is_skipped_is_trained_if_its_checkpoint_was(version: int, tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3")
    asyncio.run(Counting(trainer, 3).train())
    resumed = Counting(trainer, 4)
    checkpoint = load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(3))
    resumed.resume(replace(checkpoint, state=replace(checkpoint.state, policy_version=version)))
    resumed.metrics = updates(1, 1)
    failed = pytest.raises(RunIncomplete, match="was not trained") if version == 0 else contextlib.nullcontext()
    with failed:
        asyncio.run(resumed.train())
    assert resumed.global_step == 4 and steps(trainer) == [3] + [4] * (version > 0)


def test_the_first_of_consecutive_updates_with_skipped_steps_is_a_warning(caplog: pytest.LogCaptureFixture):
    skipped = SkippedUpdates()
    for step, num_skipped in enumerate([0, 1, 2, 0, 2], start=1):
        skipped.count(step, updates(2, num_skipped) if step != 4 else updates(0, 0))
    (message,) = caplog.messages
    assert message.startswith("policy/grad_norm of step 2 is not finite: 1 of the step's 2 optimizer steps")
    assert "were skipped, without a change of weights or optimizer state" in message
    skipped.count(6, updates(2, 0))
    skipped.count(7, updates(2, 1))
    assert caplog.messages[1].startswith("policy/grad_norm of step 7 is not finite")


def test_skipped_steps_of_the_critic_are_a_warning_too(caplog: pytest.LogCaptureFixture):
    critic = {"critic/num_optimizer_steps": 4.0, "critic/num_skipped_steps": 4.0}
    SkippedUpdates().count(3, updates(2, 0) | critic)
    (message,) = caplog.messages
    assert message.startswith("critic/grad_norm of step 3 is not finite: 4 of the step's 4 optimizer steps")


def test_a_gradient_norm_a_hundred_times_its_median_is_a_warning(caplog: pytest.LogCaptureFixture):
    anomalies = Anomalies()
    for step, norm in enumerate([500.0, 1.0, 2.0, 3.0, 2.0, 199.0, 2.0, float("nan"), 201.0], start=1):
        anomalies.note(step, {"policy/grad_norm": norm})
    (message,) = caplog.messages
    assert message.startswith("policy/grad_norm of step 9 is 201, 100 times the median of the last 7 steps (2)")


def test_rewards_that_are_always_the_same_number_are_a_warning_once(caplog: pytest.LogCaptureFixture):
    anomalies = Anomalies()
    constant = {"reward/zero_variance_share": 1.0, "reward/avg_raw_reward": 0.0}
    others = [constant | {"reward/avg_raw_reward": 1.0}, {**constant, "reward/zero_variance_share": 0.9}]
    for step, metrics in enumerate([constant] * 4 + others + [constant] * 7, start=1):
        anomalies.note(step, metrics)
    (message,) = caplog.messages
    assert message.startswith("every reward of the last 5 steps, up to step 11, was 0: nothing is learned.")


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


def made_again(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "run.json").touch()


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def emptied(folder: Path) -> None:
    (folder / "run.json").unlink()


@pytest.mark.parametrize("do", [deleted, made_again, moved, emptied])
def test_a_run_folder_that_was_deleted_is_an_error_at_once_and_at_the_end(
    do: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (run_dir := tmp_path / "run").mkdir()
    (run_dir / "run.json").touch()
    loop = Counting(trainer_config(tmp_path, f"trainer.ckpt_path={tmp_path}/checkpoints"), 3)
    loop.run_folder = HeldFolder(run_dir, "trainer.run_dir", "run.json")
    loop.after_step = lambda: loop.policy.num_steps == 2 and do(run_dir)
    with pytest.raises(RunIncomplete, match=r"trainer.run_dir is .*run: the folder was deleted, moved or replaced"):
        asyncio.run(loop.train())
    assert loop.global_step == 3 and caplog.text.count("The run will end with exit code 1") == 1


def test_a_folder_of_checkpoints_that_was_deleted_is_an_error_also_when_it_was_made_again(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1")
    loop = Counting(trainer, 4)
    loop.after_step = lambda: loop.policy.num_steps == 3 and shutil.rmtree(trainer.ckpt_path)
    with pytest.raises(RunIncomplete, match=r"trainer.ckpt_path is .*checkpoints: the folder was deleted"):
        asyncio.run(loop.train())
    assert steps(trainer) == [3, 4]


def test_the_newest_checkpoint_must_be_there_at_the_end(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=2")
    loop = Counting(trainer, 4)
    finish = loop._checkpoints.finish

    def finish_and_delete(folder: Path, *others: Any) -> None:
        finish(folder, *others)
        if folder.name == "global_step_4":
            shutil.rmtree(folder)

    loop._checkpoints.finish = finish_and_delete  # type: ignore[method-assign, assignment]
    with pytest.raises(RunIncomplete, match="the newest checkpoint, .*global_step_4, was deleted"):
        asyncio.run(loop.train())


def test_a_file_system_that_does_not_answer_for_a_moment_is_no_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held = HeldFolder(tmp_path, "trainer.run_dir")
    with monkeypatch.context() as patch:
        patch.setattr("os.stat", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        problem = held.problem
    assert problem is None and held.problem is None


def test_json_lines_that_were_deleted_are_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (folder := tmp_path / "run").mkdir()
    writer = JsonLinesWriter(folder / "rows.jsonl")
    writer.write({"a": 1})
    (folder / "rows.jsonl").unlink()
    writer.write({"a": 2})
    assert json.loads((folder / "rows.jsonl").read_text()) == {"a": 2}
    assert "rows.jsonl was deleted during the run: its earlier lines are lost" in caplog.text
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        writer.write({"a": 3})
    folder.mkdir()
    writer.write({"a": 4})
    assert (folder / "rows.jsonl").read_text() == '{"a": 3}\n{"a": 4}\n'


class _Run(Run):
    """One whose loop is given."""

    num_train_rows = 10

    def __init__(self, trainer_overrides: list[str], loop: Counting) -> None:
        self.config, self.checkpoint, self._given = load_sft_config(trainer_overrides), None, loop
        self.base = {}

    async def launch(self, cluster: Any, logs: str) -> Any:
        raise NotImplementedError

    def introduction(self, layout: str) -> dict[str, str]:
        raise NotImplementedError

    def build_loop(self, *parts: Any) -> Counting:
        return self._given


def test_a_run_that_has_ended_leaves_its_checkpoints_to_another(tmp_path: Path):
    """A notebook keeps the traceback of a failed run, and so the run."""
    overrides = [f"trainer.run_dir={tmp_path}/run", f"trainer.ckpt_path={tmp_path}/checkpoints"]
    one = _Run(overrides, Counting(trainer_config(tmp_path), 1))
    one._checkpoint_lock = lock_checkpoints(one.config.trainer)
    with pytest.raises(ValueError, match="trainer.ckpt_path"):
        lock_checkpoints(one.config.trainer)
    one.close()
    lock_checkpoints(one.config.trainer).close()


def test_a_program_fails_when_its_run_folder_is_deleted(tmp_path: Path):
    run_dir = create_run_dir(tmp_path / "run", "run", "", {})
    loop = Counting(trainer_config(tmp_path, f"trainer.ckpt_path={tmp_path}/checkpoints"), 2)
    loop.after_step = lambda: loop.policy.num_steps == 1 and shutil.rmtree(run_dir.path)
    one = _Run([f"trainer.run_dir={tmp_path}/run", "trainer.logger=[jsonl]"], loop)
    with pytest.raises(RunIncomplete, match="trainer.run_dir is .*: the folder was deleted"):
        asyncio.run(one._train(run_dir, None))
    run_dir.finish("failed")


def test_a_sink_in_place_of_the_tracker_is_refused_before_the_first_step(tmp_path: Path):
    class OwnTracker(_Run):
        def get_tracker(self, run_dir: Any, num_steps: int) -> Any:
            return contextlib.nullcontext()

    run_dir = create_run_dir(tmp_path / "run", "run", "", {})
    loop = Counting(trainer_config(tmp_path), 1)
    one = OwnTracker([f"trainer.run_dir={tmp_path}/run"], loop)
    with pytest.raises(ValueError, match=r"OwnTracker.get_tracker returned a nullcontext: it must return a .*Tracker"):
        asyncio.run(one._train(run_dir, None))
    assert loop.policy.num_steps == 0
    run_dir.finish("failed")
