"""Checkpoints of a run: when they are written, which stay, and which one a run goes on from."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.config.sft import load_sft_config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import Order, OrderState
from skyrl_train.entrypoints.resume import chosen_checkpoint, goes_on_in_its_folder
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.run_state import RECORD, Checkpoints, RunState, layout_of, load_checkpoint
from skyrl_train.types import Metrics

NUM_ROWS = 10


def trainer_config(folder: Path, *overrides: str) -> TrainingConfig:
    return load_sft_config(
        [
            f"trainer.run_dir={folder}/run",
            "trainer.train_batch_size=2",
            "trainer.seed=3",
            "trainer.hf_save_interval=-1",
            "trainer.max_ckpts_to_keep=-1",
            *overrides,
        ]
    ).trainer


def save(trainer: TrainingConfig, global_step: int, saved_unix_s: float, **changes: Any) -> Path:
    """A checkpoint as a run of `trainer` leaves it."""
    checkpoints = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep)
    folder = checkpoints.folder(global_step)
    checkpoints.begin(folder)
    (folder / "rank_0.pt").write_text("state")
    order = OrderState(epoch=0, position=2 * global_step, num_rows=NUM_ROWS, seed=3)
    state = RunState(global_step, global_step, order, layout_of(trainer), saved_unix_s)
    checkpoints.finish(folder, replace(state, **changes))
    return folder


def steps(trainer: TrainingConfig) -> list[int]:
    return [one.state.global_step for one in Checkpoints(trainer.ckpt_path, 1).all()]


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path):
    trainer = trainer_config(tmp_path)
    folder = save(trainer, 4, 1.5)
    read = load_checkpoint(folder)
    assert read.state == RunState(4, 4, OrderState(0, 8, NUM_ROWS, 3), layout_of(trainer), 1.5)
    assert (read.saved.folder, read.saved.policy_version) == (str(folder), 4)


def test_without_its_record_a_folder_is_no_checkpoint(tmp_path: Path):
    trainer = trainer_config(tmp_path)
    folder = save(trainer, 4, 1.0)
    (folder / RECORD).unlink()
    assert steps(trainer) == []
    with pytest.raises(ValueError, match="is no whole checkpoint: it has no checkpoint.json"):
        load_checkpoint(folder)
    (folder / RECORD).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(folder)
    (folder / RECORD).write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="of another version of skyrl_train"):
        load_checkpoint(folder)


def test_files_that_the_driver_does_not_see_make_no_checkpoint(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.placement.policy_num_gpus_per_node=3")
    with pytest.raises(
        OSError, match=r"files of ranks \[1, 2\] are not in .*: trainer.ckpt_path must be one folder for"
    ):
        save(trainer, 4, 1.0)
    assert steps(trainer) == []


def test_the_newest_stay_and_what_broke_off_goes(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=2")
    broken = save(trainer, 1, 1.0)
    (broken / RECORD).unlink()
    (broken / "rank_1.tmp").write_text("half")
    for step in (2, 3, 4):
        save(trainer, step, float(step))
    unreadable = Path(trainer.ckpt_path) / "global_step_9"
    unreadable.mkdir()
    (unreadable / RECORD).write_text("{")
    (Path(trainer.ckpt_path) / "global_step_3/notes.txt").write_text("mine")
    save(trainer, 5, 5.0)
    assert (unreadable / RECORD).exists()
    (unreadable / RECORD).unlink()
    assert steps(trainer) == [4, 5] and not broken.exists()
    assert [path.name for path in (Path(trainer.ckpt_path) / "global_step_3").iterdir()] == ["notes.txt"]


def test_a_run_goes_on_from_what_was_written_last_and_not_from_the_highest_step(tmp_path: Path):
    """As after going back to an earlier step."""
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    save(trainer, 8, 1.0)
    save(trainer, 4, 2.0)
    chosen = chosen_checkpoint(trainer, NUM_ROWS)
    assert chosen is not None and chosen.state.global_step == 4
    assert goes_on_in_its_folder(trainer, chosen)


def test_without_a_checkpoint_latest_starts_anew(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    assert chosen_checkpoint(trainer, NUM_ROWS) is None and not goes_on_in_its_folder(trainer, None)


def test_a_checkpoint_from_elsewhere_starts_a_folder_and_one_of_the_run_stays_in_its(tmp_path: Path):
    elsewhere = save(trainer_config(tmp_path / "other"), 4, 1.0)
    own = save(trainer_config(tmp_path), 2, 1.0)
    for folder, stays in ((elsewhere, False), (own, True)):
        asked = ["trainer.resume_mode=from_path", f"trainer.resume_path={folder}"]
        trainer = trainer_config(tmp_path, *asked)
        chosen = chosen_checkpoint(trainer, NUM_ROWS)
        assert chosen is not None and chosen.folder == folder
        assert goes_on_in_its_folder(trainer, chosen) is stays


@pytest.mark.parametrize("mode", [None, "from_path"])
def test_a_run_does_not_write_beside_the_checkpoints_of_another(mode: str | None, tmp_path: Path):
    shared = f"trainer.ckpt_path={tmp_path}/shared"
    save(trainer_config(tmp_path, shared), 4, 1.0)
    asked = []
    if mode is not None:
        other = save(trainer_config(tmp_path / "other"), 2, 1.0)
        asked = [f"trainer.resume_mode={mode}", f"trainer.resume_path={other}"]
    with pytest.raises(ValueError, match="holds checkpoints, the last of step 4: go on from it with .*=latest, or"):
        chosen_checkpoint(trainer_config(tmp_path, shared, *asked), NUM_ROWS)
    chosen_checkpoint(trainer_config(tmp_path, shared, *asked, "trainer.ckpt_interval=-1"), NUM_ROWS)


@pytest.mark.parametrize(
    ("overrides", "num_rows", "message"),
    [
        ([], NUM_ROWS + 1, "is of 10 training rows .* and these are 11 rows .* Give the same data and seed"),
        (["trainer.seed=4"], NUM_ROWS, "the order of trainer.seed=3, and these are 10 rows with trainer.seed=4"),
        (
            ["trainer.placement.policy_num_gpus_per_node=2", "+pp=2"],
            NUM_ROWS,
            "another layout: policy ranks was 1 and is 2, pipeline_model_parallel_size was 1 and is 2. Give the same",
        ),
    ],
)
def test_a_checkpoint_of_other_rows_or_of_another_layout_is_refused_before_anything_starts(
    overrides: list[str], num_rows: int, message: str, tmp_path: Path
):
    save(trainer_config(tmp_path), 4, 1.0)
    pp = "trainer.policy.megatron_config.pipeline_model_parallel_size=2"
    asked = [pp if one == "+pp=2" else one for one in overrides]
    with pytest.raises(ValueError, match=message):
        chosen_checkpoint(trainer_config(tmp_path, "trainer.resume_mode=latest", *asked), num_rows)


class Policy:
    """Counts the steps that were done with it, and writes a file."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.error: Exception | None = None
        self.answers = True

    async def copy_state(self, folder: str) -> None:
        Path(folder, "rank_0.tmp").write_text("half")
        if self.error is not None:
            raise self.error
        Path(folder, "rank_0.tmp").rename(Path(folder, "rank_0.pt"))

    async def is_idle(self) -> bool:
        return self.answers


class Counting(Loop):
    """A step takes a batch of rows."""

    can_evaluate = False

    def __init__(self, trainer: TrainingConfig, num_steps: int, stop_at: int | None = None) -> None:
        self.policy, self.batches, self.stop_at = Policy(), [], stop_at
        order = Order(range(NUM_ROWS), batch_size=trainer.train_batch_size, seed=trainer.seed)
        super().__init__(trainer, order, self.policy, Tracker([]), Timers(), num_steps)  # type: ignore[arg-type]

    async def step(self) -> Metrics:
        self.batches.append(self._order.next_batch())
        self.policy.num_steps += 1
        if len(self.batches) == self.stop_at:
            self.stop()
        return {}

    async def evaluate(self) -> Metrics:
        raise AssertionError

    async def reach_policy(self) -> None:
        pass


def test_checkpoints_are_written_every_few_steps_and_after_the_last(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3")
    asyncio.run(Counting(trainer, 7).train())
    assert steps(trainer) == [3, 6, 7]
    never = trainer_config(tmp_path / "never", "trainer.ckpt_interval=-1")
    asyncio.run(Counting(never, 7).train())
    assert steps(never) == [] and not Path(never.ckpt_path).exists()


def test_a_run_that_is_told_to_stop_writes_one(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3")
    for stop_at in (3, 4, 7):
        asyncio.run(Counting(trainer, 7, stop_at=stop_at).train())
    assert sorted(steps(trainer)) == [3, 4, 6], (
        "what the last step leaves to do is done when the run goes on from before"
    )


def test_a_run_that_goes_on_trains_on_the_rows_that_are_left_in_their_order(tmp_path: Path):
    """Through the end of an epoch of 5 steps."""
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=4")
    whole = Counting(trainer, 12)
    asyncio.run(whole.train())
    for step in (4, 8):
        resumed = Counting(trainer, 12)
        resumed.go_on(load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(step)).state)
        asyncio.run(resumed.train())
        assert resumed.batches == whole.batches[step:] and resumed.global_step == 12


def test_a_checkpoint_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1")
    loop = Counting(trainer, 3)
    asyncio.run(loop.train())
    loop.policy.error, loop._num_steps = RemoteFailed("policy-0: No space left on device"), 4
    asyncio.run(loop.train())
    assert "the checkpoint of step 4 could not be written, the run goes on: policy-0: No space left" in caplog.text
    assert steps(trainer) == [1, 2, 3] and not Checkpoints(trainer.ckpt_path, -1).folder(4).exists()
    loop.policy.answers, loop._num_steps = False, 5
    with pytest.raises(RemoteFailed):
        asyncio.run(loop.train())


def test_a_folder_that_cannot_be_made_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    loop = Counting(trainer_config(tmp_path, "trainer.ckpt_interval=1", f"trainer.ckpt_path={tmp_path}/file/x"), 2)
    asyncio.run(loop.train())
    assert loop.global_step == 2 and caplog.text.count("could not be written, the run goes on") == 2
