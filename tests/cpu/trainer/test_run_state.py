"""Checkpoints of a run: when they are written, which stay, and which one a run resumes from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file, save_file

from skyrl_train.checks.model_folder import require_models_outside
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.settings import all_engine_settings
from skyrl_train.config import load_config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import Order, OrderState
from skyrl_train.entrypoints.resume import (
    chosen_checkpoint,
    identities,
    lock_checkpoints,
    require_export_folder,
    resumes_in_its_folder,
    with_missing_export,
)
from skyrl_train.file_sum import FileSum, sum_of
from skyrl_train.hf.checkpoint import INDEX, SUMS, export_sum
from skyrl_train.hf.identity import identity
from skyrl_train.rollout.source import SourceFailure
from skyrl_train.tracking.run_dir import write_record
from skyrl_train.trainer import run_state as module
from skyrl_train.trainer.from_config import settings_of
from skyrl_train.trainer.problems import RunIncomplete
from skyrl_train.trainer.run_state import DRAFT, RECORD, Checkpoints, RunState, load_checkpoint
from skyrl_train.types import Metrics
from tests.support.counting import NUM_ROWS, Counting, steps, trainer_config
from tests.support.families import write_family


def save(trainer: TrainingConfig, global_step: int, **changes: Any) -> Path:
    """A checkpoint as a run of `trainer` leaves it."""
    checkpoints = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep)
    folder = checkpoints.folder(global_step)
    checkpoints.begin(folder)
    (folder / "rank_0.pt").write_text("state")
    sums = [sum_of(folder / "rank_0.pt")]
    checkpoints.finish(folder, replace(state_of(trainer, global_step), **changes), sums)
    return folder


def state_of(trainer: TrainingConfig, global_step: int) -> RunState:
    order = OrderState(epoch=0, position=2 * global_step, num_rows=NUM_ROWS, seed=3)
    return RunState(global_step, global_step, False, asdict(order), 1, settings_of(trainer), "this run", {})


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path):
    trainer = trainer_config(tmp_path)
    folder = save(trainer, 4)
    read = load_checkpoint(folder)
    assert read.state == state_of(trainer, 4) and read.number == 1
    assert (read.saved.folder, read.saved.num_steps) == (str(folder), 4)


class Holding(Order[int]):
    """A source whose finished groups are these bytes."""

    data = b"two groups"

    def snapshot(self) -> tuple[dict[str, Any], bytes]:
        return self.state, self.data

    def restore(self, state: dict[str, Any], data: bytes) -> None:
        self.resume(state)
        self.data = data


def test_finished_groups_are_a_file_of_the_checkpoint_under_its_digests(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1")
    loop = Counting(trainer, 2)
    loop._source = Holding(range(NUM_ROWS), batch_size=2, seed=3)
    asyncio.run(loop.train())
    _, checkpoint = Checkpoints(trainer.ckpt_path, -1).all()
    assert checkpoint.groups == b"two groups" and "groups.safetensors" in checkpoint.files
    resumed = Counting(trainer, 3)
    resumed._source = Holding(range(NUM_ROWS), batch_size=2, seed=3)
    resumed._source.data = b""
    resumed.resume(checkpoint)
    assert resumed._source.data == b"two groups"
    assert save(trainer, 8) and Checkpoints(trainer.ckpt_path, -1).all()[-1].groups == b"", "without any no file"

    file = checkpoint.folder / "groups.safetensors"
    file.write_bytes(b"two grouqs")
    with pytest.raises(ValueError, match=r"is damaged: groups.safetensors has other bytes"):
        checkpoint.verify()
    file.unlink()
    with pytest.raises(ValueError, match=r"is damaged: groups.safetensors is missing"):
        load_checkpoint(checkpoint.folder)
    file.write_bytes(b"two groups")
    Checkpoints(trainer.ckpt_path, -1).discard(checkpoint.folder)
    assert not checkpoint.folder.exists()


def test_a_run_with_another_source_does_not_resume_and_a_state_of_ones_own_comes_back_as_it_was(tmp_path: Path):
    own, resume = "trainer.source=own_source:Files", "trainer.resume_mode=latest"

    def reinforcement(*overrides: str) -> TrainingConfig:
        return load_config([f"trainer.run_dir={tmp_path}/run", *overrides]).trainer

    save(reinforcement(own), 4, source={"file": 3, "line": [1, 2]})
    chosen = chosen_checkpoint(reinforcement(own, resume), NUM_ROWS + 1)
    assert chosen is not None and chosen.state.source == {"file": 3, "line": [1, 2]}
    with pytest.raises(ValueError, match="trainer.source was own_source:Files, now None"):
        chosen_checkpoint(reinforcement(resume), NUM_ROWS)


def test_a_record_has_the_digest_of_what_is_read(tmp_path: Path):
    """JSON makes text of keys, in whose order the digest is computed: 10 before 2."""
    folder = save(trainer_config(tmp_path), 4, source={"used": {2: 1, 10: 1}})
    assert load_checkpoint(folder).state.source == {"used": {"2": 1, "10": 1}}


def test_latest_means_the_branch_that_was_resumed_last(tmp_path: Path):
    """Also if the run ends before its own first checkpoint; what it went back behind is pruned first."""
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=-1")
    first, *_ = (save(trainer, step) for step in (3, 5, 7))
    checkpoints = Checkpoints(trainer.ckpt_path, -1)

    def resume(folder: Path, num_steps: int) -> None:
        loop = Counting(trainer, num_steps)
        loop.resume(load_checkpoint(folder))
        asyncio.run(loop.train())

    resume(first, 3)
    assert checkpoints.all()[-1].folder.name == "global_step_7", "nothing was trained, only exported or evaluated"
    resume(first, 4)
    newest = checkpoints.newest_intact()
    assert newest is not None and newest.folder == first and newest.state == state_of(trainer, 3)
    before = (first / RECORD).read_bytes()
    resume(first, 4)
    assert (first / RECORD).read_bytes() == before, "it is the newest already"
    save(replace(trainer, max_ckpts_to_keep=2), 4)
    assert checkpoints.names() == ["global_step_3", "global_step_4"]


@pytest.mark.parametrize(("interval", "is_refused"), [(4, True), (-1, False)])
def test_a_state_that_cannot_be_saved_ends_a_run_with_checkpoints_before_its_first_step(
    interval: int, is_refused: bool, tmp_path: Path
):
    loop = Counting(trainer_config(tmp_path, f"trainer.ckpt_interval={interval}"), 2)

    class Own:
        state: ClassVar[dict[str, Any]] = {"left": {1}}

    loop._source = Own()  # type: ignore[assignment]
    with pytest.raises(SourceFailure, match="left") if is_refused else contextlib.nullcontext():
        asyncio.run(loop.train())
    assert loop.policy.num_steps == (0 if is_refused else 2)


def test_a_run_with_cancelled_rows_resumes(tmp_path: Path):
    trainer = load_config([f"trainer.run_dir={tmp_path}/run", "trainer.seed=3", "trainer.resume_mode=latest"]).trainer
    order = state_of(trainer, 4).source
    save(trainer, 4, source={"order": order, "cancelled": [["u1", 0, 1]]})
    chosen = chosen_checkpoint(trainer, NUM_ROWS)
    assert chosen is not None and chosen.state.source["cancelled"] == [["u1", 0, 1]]


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"format": 1}', '{"format": 1, "state": {"order": 2}}', '{"format": 0}']
)
def test_what_this_program_did_not_write_is_no_checkpoint_and_disturbs_none(content: str, tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=1")
    other = Path(trainer.ckpt_path) / "global_step_9"
    other.mkdir(parents=True)
    (other / RECORD).write_text(content)
    with pytest.raises(ValueError, match="checkpoint.json cannot be read"):
        load_checkpoint(other)
    save(trainer, 10)
    save(trainer, 11)
    assert (other / RECORD).read_text() == content
    (other / RECORD).unlink()
    assert steps(trainer) == [11]


def test_without_its_record_or_a_rank_a_folder_is_no_checkpoint(tmp_path: Path):
    trainer = trainer_config(tmp_path)
    folder = save(trainer, 4)
    with pytest.raises(
        ValueError, match="is not a complete checkpoint: it has no checkpoint.json. Name one of global_step_4 in"
    ):
        load_checkpoint(folder.parent)
    with pytest.raises(ValueError, match="Name one of .*global_step_4 in it"):
        load_checkpoint(folder.parent.parent)
    with pytest.raises(ValueError, match="gone does not exist"):
        load_checkpoint(folder / "gone")
    (folder / "rank_0.pt").rename(folder / "elsewhere")
    with pytest.raises(ValueError, match="is damaged: rank_0.pt is missing"):
        load_checkpoint(folder)
    (folder / RECORD).unlink()
    assert steps(trainer) == []
    with pytest.raises(ValueError, match="is not a complete checkpoint: it has no checkpoint.json$"):
        load_checkpoint(folder)


def test_a_checkpoint_that_its_run_replaces_while_it_is_verified_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=1")
    older, verify = save(trainer, 4), module.problems_of

    def rotated(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
        if folder == older:
            save(trainer, 5)
        return verify(folder, files)

    monkeypatch.setattr(module, "problems_of", rotated)
    newest = Checkpoints(trainer.ckpt_path, -1).newest_intact()
    assert newest is not None and newest.state.global_step == 5 and not older.exists()
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def digit_of_the_step(folder: Path) -> int:
    return (folder / RECORD).read_bytes().index(b'"global_step": ') + len('"global_step": ')


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit of a rank": (lambda folder: flip(folder / "rank_0.pt", 2), "rank_0.pt has other bytes than were"),
    "a truncated rank": (lambda folder: (folder / "rank_0.pt").write_text("stat"), "has 4 bytes instead of 5"),
    "a missing rank": (lambda folder: (folder / "rank_0.pt").unlink(), "rank_0.pt is missing"),
    "another step in the record": (
        lambda folder: flip(folder / RECORD, digit_of_the_step(folder)),
        "was changed after",
    ),
    "a truncated record": (lambda folder: os.truncate(folder / RECORD, 40), "checkpoint.json cannot be read"),
    "an empty record": (lambda folder: os.truncate(folder / RECORD, 0), "checkpoint.json cannot be read"),
    "no text in the record": (lambda folder: (folder / RECORD).write_bytes(b"\xff\xfe"), "cannot be read"),
    "a missing record": (lambda folder: (folder / RECORD).unlink(), "it has no checkpoint.json"),
    "a format without digests": (
        lambda folder: (folder / RECORD).write_text(
            (folder / RECORD).read_text().replace('"format": 2', '"format": 1')
        ),
        "it has the format 1, and this version of skyrl_train reads 2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_damaged_checkpoints_the_next_older_intact_one_is_used_and_said(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    do, message = DAMAGES[damage]
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    folders = [save(trainer, step) for step in (2, 4, 6)]
    do(folders[2])
    chosen = chosen_checkpoint(trainer, NUM_ROWS)
    assert chosen is not None and chosen.folder == folders[1]
    assert message in caplog.text and str(folders[2]) in caplog.text
    assert f"the newest intact checkpoint is {folders[1]}" in caplog.text
    do(folders[1])
    chosen = chosen_checkpoint(trainer, NUM_ROWS)
    assert chosen is not None and chosen.folder == folders[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_an_intact_checkpoint_nothing_starts(damage: str, tmp_path: Path):
    do, message = DAMAGES[damage]
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    folder = save(trainer, 2)
    do(folder)
    with pytest.raises(
        ValueError, match="none of its checkpoints is intact .*To start again from the model, move"
    ) as e:
        chosen_checkpoint(trainer, NUM_ROWS)
    assert message in str(e.value)
    named = trainer_config(tmp_path, "trainer.resume_mode=from_path", f"trainer.resume_path={folder}")
    with pytest.raises(ValueError, match=message):
        chosen_checkpoint(named, NUM_ROWS)


def test_a_run_killed_while_it_wrote_its_first_checkpoint_starts_from_the_model(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    checkpoints, folder = Checkpoints(trainer.ckpt_path, 1), Path(trainer.ckpt_path) / "global_step_2"
    checkpoints.begin(folder)
    (folder / "rank_0.pt").write_text("state")
    assert chosen_checkpoint(trainer, NUM_ROWS) is None


def test_an_old_checkpoint_stays_until_the_new_one_is_known_to_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=1")
    save(trainer, 2)
    checkpoints, folder = Checkpoints(trainer.ckpt_path, 1), Path(trainer.ckpt_path) / "global_step_4"
    checkpoints.begin(folder)
    (folder / "rank_0.pt").write_text("sta")
    with pytest.raises(OSError, match="rank_0.pt has 3 bytes instead of 5"):
        checkpoints.finish(folder, state_of(trainer, 4), [FileSum(5, "")])
    (folder / "rank_0.pt").write_text("state")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda draft, record: record.write_text("{"))
        with pytest.raises(OSError, match="checkpoint.json cannot be read"):
            checkpoints.finish(folder, state_of(trainer, 4), [sum_of(folder / "rank_0.pt")])
    assert steps(trainer) == [2]


def test_files_that_the_driver_does_not_see_make_no_checkpoint(tmp_path: Path):
    trainer = trainer_config(tmp_path)
    checkpoints, folder = Checkpoints(trainer.ckpt_path, 1), Path(trainer.ckpt_path) / "global_step_4"
    checkpoints.begin(folder)
    sums = [FileSum(5, "")] * 2
    with pytest.raises(OSError, match=r"rank_0.pt is missing; rank_1.pt is missing. trainer.ckpt_path must be one"):
        checkpoints.finish(folder, state_of(trainer, 4), sums)
    assert steps(trainer) == []


def test_the_newest_stay_and_incomplete_ones_are_removed(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=2")
    broken = save(trainer, 1)
    (broken / RECORD).rename(broken / DRAFT)
    (broken / "rank_1.tmp").write_text("half")
    Checkpoints(trainer.ckpt_path, 2).begin(Path(trainer.ckpt_path) / "global_step_2")
    assert not broken.exists(), "before the next is written"
    for step in (2, 3, 4):
        save(trainer, step)
    (Path(trainer.ckpt_path) / "global_step_3/notes.txt").write_text("mine")
    save(trainer, 5)
    assert steps(trainer) == [4, 5]
    assert [path.name for path in (Path(trainer.ckpt_path) / "global_step_3").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("num_removed", range(5))
def test_a_checkpoint_with_a_critic_whose_removal_was_killed_is_removed_by_the_next_run(
    num_removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_config(tmp_path)
    folder = save(trainer, 2)
    (folder / "critic").mkdir()
    for name in ("rank_1.pt", "critic/rank_0.pt", "critic/rank_1.pt"):
        (folder / name).write_text("state")
    unlink, removed = Path.unlink, list[Path]()

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path)
            if len(removed) > num_removed:
                raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        Checkpoints(trainer.ckpt_path, 1).discard(folder)
    assert steps(trainer) == []
    Checkpoints(trainer.ckpt_path, 1).begin(Path(trainer.ckpt_path) / "global_step_4")
    assert not folder.exists()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_cost_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    trainer = trainer_config(tmp_path, "trainer.max_ckpts_to_keep=1")
    archived = save(trainer, 1).rename(tmp_path / "archived")
    (Path(trainer.ckpt_path) / "global_step_1").symlink_to(archived)
    save(trainer, 2)
    assert load_checkpoint(archived), "what was linked is the user's"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda path: (_ for _ in ()).throw(OSError("Device or resource busy")))
        save(trainer, 3)
    assert "global_step_2 could not be removed: Device or resource busy" in caplog.text
    assert steps(trainer) == [1, 3]


def test_a_run_resumes_from_what_was_written_last_and_not_from_the_highest_step(tmp_path: Path):
    """As after going back to an earlier step."""
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    save(trainer, 8)
    save(trainer, 4)
    chosen = chosen_checkpoint(trainer, NUM_ROWS)
    assert chosen is not None and chosen.state.global_step == 4
    assert resumes_in_its_folder(trainer, chosen)


def test_without_a_checkpoint_latest_starts_a_new_run(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.resume_mode=latest")
    assert chosen_checkpoint(trainer, NUM_ROWS) is None and not resumes_in_its_folder(trainer, None)


def test_a_run_stays_in_its_folder_and_in_no_other(tmp_path: Path):
    """By the checkpoints in it, and by its number where these lie elsewhere."""
    run_dir = tmp_path / "run"
    elsewhere = save(trainer_config(tmp_path / "other"), 4)
    own, shared = (
        save(trainer_config(tmp_path), 2),
        save(trainer_config(tmp_path, f"trainer.ckpt_path={tmp_path}/c"), 6),
    )
    for folder, run_id, stays in (
        (elsewhere, "another", False),
        (own, "another", True),
        (shared, "another", False),
        (shared, "this run", True),
    ):
        write_record(run_dir, {"run_id": run_id})
        trainer = trainer_config(tmp_path, "trainer.resume_mode=from_path", f"trainer.resume_path={folder}")
        chosen = chosen_checkpoint(trainer, NUM_ROWS)
        assert chosen is not None and chosen.folder == folder
        assert resumes_in_its_folder(trainer, chosen) is stays


@pytest.mark.parametrize("mode", [None, "from_path"])
def test_a_run_does_not_write_beside_the_checkpoints_of_another(mode: str | None, tmp_path: Path):
    shared = f"trainer.ckpt_path={tmp_path}/shared"
    save(trainer_config(tmp_path, shared), 4)
    asked = []
    if mode is not None:
        other = save(trainer_config(tmp_path / "other"), 2)
        asked = [f"trainer.resume_mode={mode}", f"trainer.resume_path={other}"]
    with pytest.raises(
        ValueError, match=r"it already contains checkpoints \(global_step_4\). Resume with .*=latest, or"
    ):
        chosen_checkpoint(trainer_config(tmp_path, shared, *asked), NUM_ROWS)
    chosen_checkpoint(trainer_config(tmp_path, shared, *asked, "trainer.ckpt_interval=-1"), NUM_ROWS)


def test_an_export_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path):
    (tmp_path / "file").write_text("")
    bad = f"trainer.export_path={tmp_path}/file/exports"
    with pytest.raises(ValueError, match=r"trainer.export_path is .*file/exports: nothing can be written there"):
        require_export_folder(trainer_config(tmp_path, bad, "trainer.hf_save_interval=-1"), 4)
    require_export_folder(trainer_config(tmp_path, bad, "trainer.hf_save_interval=0"), 4)
    require_export_folder(trainer_config(tmp_path, f"trainer.export_path={tmp_path}/other/exports"), 4)


def test_exports_do_not_replace_a_model_of_the_run(tmp_path: Path):
    """A reference that is loaded again would be the policy."""
    (tmp_path / "exports/global_step_5").mkdir(parents=True)
    keys = (f"trainer.export_path={tmp_path}/exports", "trainer.algorithm.use_kl_loss=true")
    reference = f"trainer.ref.model.path={tmp_path}/exports/global_step_5"
    with pytest.raises(ValueError, match="could replace .*/global_step_5, from which the run loads trainer.ref.model"):
        require_export_folder(load_config([*keys, reference]).trainer, 5)
    require_export_folder(load_config([*keys, reference]).trainer, 4)
    require_export_folder(load_config([*keys, reference, "trainer.hf_save_interval=0"]).trainer, 5)
    require_export_folder(load_config([*keys, f"trainer.ref.model.path={tmp_path}/exports"]).trainer, 5)


def test_a_model_in_the_folder_that_a_new_run_renames_is_refused(tmp_path: Path):
    (model := tmp_path / "run/exports/global_step_3").mkdir(parents=True)
    keys = f"trainer.policy.model.path={model}", f"trainer.run_dir={tmp_path}/run"
    with pytest.raises(
        ValueError, match=r"renames this folder, and loads trainer.policy.model.path from .*global_step_3"
    ):
        require_models_outside(load_config([*keys]).trainer)
    require_models_outside(load_config([*keys, f"trainer.run_dir={tmp_path}/another"]).trainer)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path):
    shared = f"trainer.ckpt_path={tmp_path}/shared"
    first, second = (trainer_config(tmp_path / name, shared, "trainer.resume_mode=latest") for name in ("a", "b"))
    held = lock_checkpoints(first)
    assert held is not None
    with pytest.raises(
        ValueError,
        match=r"trainer.ckpt_path is .*shared: the folder is used by a run .*. Choose another folder, or end",
    ):
        lock_checkpoints(second)
    held.close()
    assert lock_checkpoints(second) is not None
    assert lock_checkpoints(trainer_config(tmp_path)) is None, "the run's own folder has a lock"
    assert lock_checkpoints(trainer_config(tmp_path, shared, "trainer.ckpt_interval=-1")) is None


PP = "trainer.policy.megatron_config.pipeline_model_parallel_size"
LORA = "trainer.policy.model.lora"


@pytest.mark.parametrize(
    ("before", "overrides", "num_rows", "message"),
    [
        ([], [], NUM_ROWS + 1, "with 10 training rows .* this run has 11 rows .* Use the same data and seed"),
        ([], ["trainer.seed=4"], NUM_ROWS, "trainer.seed=3, this run has 10 rows and trainer.seed=4"),
        (
            [],
            ["trainer.placement.policy_num_gpus_per_node=2", f"{PP}=2"],
            NUM_ROWS,
            f"cannot resume from checkpoint .*: {PP} was 1, now 2, .*policy_num_gpus_per_node was 1, now 2. Use",
        ),
        ([], ["trainer.train_batch_size=5"], NUM_ROWS, "trainer.train_batch_size was 2, now 5"),
        ([], [f"{LORA}.rank=4"], NUM_ROWS, "lora.rank was 0, now 4, .*model.path was None, now Qwen"),
        (
            [f"{LORA}.rank=4"],
            [f"{LORA}.rank=4", f"{LORA}.alpha=64", "trainer.policy.model.path=other"],
            NUM_ROWS,
            "model.path was Qwen.*, now other, trainer.policy.model.lora.alpha was 16.*, now 64",
        ),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_refused_before_anything_starts(
    before: list[str], overrides: list[str], num_rows: int, message: str, tmp_path: Path
):
    save(trainer_config(tmp_path, *before), 4)
    with pytest.raises(ValueError, match=message):
        chosen_checkpoint(trainer_config(tmp_path, "trainer.resume_mode=latest", *overrides), num_rows)


@pytest.mark.parametrize(
    ("lora", "change", "expected"),
    [
        (
            0,
            "config",
            "began with another model. trainer.policy.model.path .*/other has another config.json [(]rms_norm",
        ),
        (0, "weights", None),
        (4, "weights", " has other weights. Use the same values, or start a new run from a Hugging Face export"),
    ],
)
def test_a_checkpoint_is_refused_with_another_model_than_that_of_its_run(
    lora: int, change: str, expected: str | None, tmp_path: Path
):
    source, other = write_family("qwen3", tmp_path / "model"), tmp_path / "other"
    shutil.copytree(source, other)
    if change == "weights":
        write_family("qwen3", other, initializer_range=0.5)
        shutil.copy(source / "config.json", other)
    else:
        (other / "config.json").write_text((source / "config.json").read_text().replace("1e-06", "0.1"))
    trainer = trainer_config(tmp_path, f"trainer.policy.model.lora.rank={lora}", "trainer.resume_mode=latest")
    loop = Counting(trainer, 2)
    loop.base = identity(str(source), has_frozen_weights=lora > 0)
    asyncio.run(loop.train())
    assert chosen_checkpoint(trainer, NUM_ROWS, str(source)) is not None
    model = replace(trainer.policy.model, path=str(other)) if lora == 0 else trainer.policy.model
    moved = replace(trainer, policy=replace(trainer.policy, model=model))
    if expected is None:
        assert chosen_checkpoint(moved, NUM_ROWS, str(other)) is not None
    else:
        with pytest.raises(ValueError, match=expected):
            chosen_checkpoint(moved, NUM_ROWS, str(other))


def with_kl(folder: Path, *overrides: str) -> TrainingConfig:
    """Reinforcement learning with a reference."""
    own = ["trainer.seed=3", "trainer.resume_mode=latest", "trainer.algorithm.use_kl_loss=true"]
    return load_config([f"trainer.run_dir={folder}/run", *own, *overrides]).trainer


@pytest.mark.parametrize("key", ["trainer.ref.model.path", "trainer.policy.model.path"])
def test_a_checkpoint_is_refused_with_another_reference_than_that_of_its_run(key: str, tmp_path: Path):
    """Its path is by default the policy's, which may change: all weights of the policy are in the checkpoint."""
    source, moved, other = write_family("qwen3", tmp_path / "model"), tmp_path / "moved", tmp_path / "other"
    shutil.copytree(source, moved)
    write_family("qwen3", other, initializer_range=0.5)
    shutil.copy(source / "config.json", other)
    policy = f"trainer.policy.model.path={source}"
    run = with_kl(tmp_path, policy)
    save(run, 4, model=identities(run, str(source)))
    assert chosen_checkpoint(with_kl(tmp_path, policy, f"{key}={moved}"), NUM_ROWS) is not None
    changed = with_kl(tmp_path, policy, f"{key}={other}")
    expected = (
        f"the reference of its run was {source}, and trainer.ref.model.path {other} has other weights. The "
        "objective would change. Set trainer.ref.model.path to the model of the run, or start"
    )
    with pytest.raises(ValueError, match=expected):
        chosen_checkpoint(changed, NUM_ROWS)
    without = with_kl(tmp_path, policy, f"{key}={other}", "trainer.algorithm.use_kl_loss=false")
    assert chosen_checkpoint(without, NUM_ROWS) is not None, "no reference is needed"
    base = identities(run, str(source))
    save(run, 5, model=base | {"reference": base.pop("frozen")["trainer.ref.model.path"]})
    with pytest.raises(ValueError, match=expected):  # an older checkpoint
        chosen_checkpoint(changed, NUM_ROWS)
    save(run, 6)
    assert chosen_checkpoint(changed, NUM_ROWS) is not None, "a checkpoint that is older than the entry"


def test_a_checkpoint_is_refused_with_another_critic_than_that_of_its_run(tmp_path: Path):
    """Which would compute values with other positions, or other routers under the trained weights."""
    source, routers = (write_family("qwen3_moe", tmp_path / name) for name in ("model", "routers"))
    other = write_family("qwen3_moe", tmp_path / "other", rms_norm_eps=1e-5)
    tensors = load_file(file := routers / "model.safetensors")
    save_file({name: 2 * tensor if ".gate." in name else tensor for name, tensor in tensors.items()}, file)
    own = [f"trainer.run_dir={tmp_path}/run", "trainer.seed=3", "trainer.resume_mode=latest"]
    own += [f"trainer.policy.model.path={source}", "trainer.algorithm.advantage_estimator=gae"]
    freeze = "trainer.policy.megatron_config.freeze_moe_router=true"

    def trainer_with(critic: Path, *more: str) -> TrainingConfig:
        return load_config([*own, f"trainer.critic.model.path={critic}", *more]).trainer

    for more in ((), (freeze,)):
        run = trainer_with(source, *more)
        save(run, 4, model=identities(run, str(source)))
        assert chosen_checkpoint(run, NUM_ROWS) is not None
        with pytest.raises(ValueError, match="the critic of its run was .* has another config.json .rms_norm_eps is"):
            chosen_checkpoint(trainer_with(other, *more), NUM_ROWS)
    with pytest.raises(ValueError, match="the critic of its run was .* has other weights"):
        chosen_checkpoint(trainer_with(routers, freeze), NUM_ROWS)


@pytest.mark.parametrize("backend", ["megatron", "engine"])
def test_a_checkpoint_is_refused_with_another_teacher_than_that_of_its_run(backend: str, tmp_path: Path):
    source, other = write_family("qwen3", tmp_path / "model"), write_family("qwen3", tmp_path / "other", vocab_size=80)
    own = [f"trainer.teacher.backend={backend}"]
    own += [f"trainer.run_dir={tmp_path}/run", "trainer.seed=3", "trainer.resume_mode=latest"]
    own += [f"trainer.policy.model.path={source}", "trainer.algorithm.distillation.distillation_type=loss"]

    def trainer_with(*teachers: str) -> TrainingConfig:
        return load_config([*own, *(f"trainer.teacher.model.{each}" for each in teachers)]).trainer

    run = trainer_with(f"path={source}", f"path_of_data_source.math={other}")
    save(run, 4, model=identities(run, str(source)))
    assert chosen_checkpoint(run, NUM_ROWS) is not None
    more = trainer_with(f"path={source}", f"path_of_data_source.math={other}", f"path_of_data_source.code={other}")
    assert chosen_checkpoint(more, NUM_ROWS) is not None, "a source that the run did not have"
    for changed in (trainer_with(f"path={other}"), trainer_with(f"path_of_data_source.math={source}")):
        with pytest.raises(ValueError, match="the teacher of its run was .* has another config.json .vocab_size is"):
            chosen_checkpoint(changed, NUM_ROWS)


def test_a_teacher_that_only_engines_know_is_compared_by_its_configuration_and_its_weights_if_they_have_names(
    tmp_path: Path,
):
    source, teacher = write_family("qwen3", tmp_path / "model"), tmp_path / "teacher"
    run = load_config(
        [
            *(f"trainer.run_dir={tmp_path}/run", "trainer.seed=3", "trainer.resume_mode=latest"),
            *(f"trainer.policy.model.path={source}", f"trainer.teacher.model.path={teacher}"),
            *("trainer.teacher.backend=engine", "trainer.algorithm.distillation.distillation_type=loss"),
        ]
    ).trainer
    teacher.mkdir()
    (teacher / "pytorch_model.bin").write_bytes(b"1234")
    config = {"model_type": "of_nobody", "hidden_size": 8, "pad_token_id": 0}
    (teacher / "config.json").write_text(json.dumps(config))
    save(run, 4, model=identities(run, str(source)))
    (teacher / "config.json").write_text(json.dumps(config | {"pad_token_id": 1}))
    assert chosen_checkpoint(run, NUM_ROWS) is not None, "a field that is not computed with"
    for other in ({"hidden_size": 16}, {"quantization_config": {"bits": 4}}):
        (teacher / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(ValueError, match="the teacher of its run was .*(hidden_size is 16, was 8|bits)"):
            chosen_checkpoint(run, NUM_ROWS)


def test_the_reference_of_adapters_is_the_policys_model(tmp_path: Path):
    source = write_family("qwen3", tmp_path / "model")
    policy = f"trainer.policy.model.path={source}"
    adapters = identities(with_kl(tmp_path, policy, "trainer.policy.model.lora.rank=4"), str(source))
    assert adapters["frozen"] == {} and adapters["fingerprint"] is not None


def test_the_export_of_a_step_is_noted_in_its_checkpoint(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1", "trainer.hf_save_interval=2")
    loop = Counting(trainer, 3)

    async def save_hf(folder: str) -> None:
        Path(folder).mkdir(parents=True)
        Path(folder, INDEX).write_text("{}")
        Path(folder, SUMS).write_text(folder)

    loop._policy.save_hf = save_hf
    asyncio.run(loop.train())
    notes = {found.state.global_step: found.state.export for found in Checkpoints(trainer.ckpt_path, -1).all()}
    exports = {step: export_sum(Path(trainer.export_path, f"global_step_{step}")) for step in (1, 2, 3)}
    assert notes == exports and exports[1] is None and len({*exports.values()}) == 3


def test_what_a_checkpoint_does_not_depend_on_may_change(tmp_path: Path):
    save(trainer_config(tmp_path), 4)
    free = ["trainer.epochs=9", "trainer.policy.model.path=moved", "trainer.max_tokens_per_microbatch=8"]
    assert chosen_checkpoint(trainer_config(tmp_path, "trainer.resume_mode=latest", *free), NUM_ROWS) is not None


def test_steps_and_learning_rate_of_reinforcement_learning_depend_on_its_batches():
    settings = settings_of(load_config([]).trainer)
    teacher = ["trainer.teacher.model.path=a", "trainer.algorithm.distillation.distillation_type=loss"]
    assert settings_of(load_config(teacher).trainer) == settings, "a checkpoint is resumed with or without a teacher"
    assert {"trainer.policy_mini_batch_size", "trainer.update_epochs_per_batch"} <= settings.keys()


def test_engines_of_a_resumed_run_sample_other_tokens():
    config = load_config(["generator.num_inference_engines=2", "trainer.seed=2147483646"])

    def seeds(policy_version: int) -> list[int]:
        return [one.seed for one in all_engine_settings(config, 64, "shm", policy_version)]  # type: ignore[union-attr]

    assert seeds(0) == [2147483646, 2147483647]
    assert len({*seeds(0), *seeds(40), *seeds(80)}) == 6 and max(seeds(40) + seeds(80)) < 2**32
    assert seeds(40) == seeds(40)


def test_checkpoints_are_written_every_few_steps_and_after_the_last(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3")
    asyncio.run(Counting(trainer, 7).train())
    assert steps(trainer) == [3, 6, 7]
    never = trainer_config(tmp_path / "never", "trainer.ckpt_interval=-1")
    asyncio.run(Counting(never, 7).train())
    assert steps(never) == [] and not Path(never.ckpt_path).exists()


def test_a_run_that_is_asked_to_stop_writes_one(tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3")
    for stop_at in (3, 4):
        asyncio.run(Counting(trainer, 7, stop_at=stop_at).train())
    assert sorted(steps(trainer)) == [3, 4]


@pytest.mark.parametrize("stop_at", [4, 7])
def test_an_evaluation_that_was_skipped_is_made_when_the_run_resumes(stop_at: int, tmp_path: Path):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3", "trainer.eval_interval=2")
    stopped, resumed = Counting(trainer, 7, stop_at=stop_at), Counting(trainer, 7)
    asyncio.run(stopped.train())
    checkpoint = load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(stop_at))
    assert checkpoint.state.pending
    resumed.resume(checkpoint)
    asyncio.run(resumed.train())
    assert stopped.evaluated + resumed.evaluated == [0, 2, 4, 6, 7]
    for step in (stop_at, 7):
        checkpoint = load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(step))
        checkpoint.verify()
        assert not checkpoint.state.pending, "the next start would do it again"


@pytest.mark.parametrize("num_steps", [4, 3])
def test_a_run_that_is_shortened_to_its_checkpoint_ends_with_an_export_and_an_evaluation(
    num_steps: int, tmp_path: Path
):
    """Once: the next start finds them in the checkpoint."""
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=4", "trainer.hf_save_interval=-1")
    asyncio.run(Counting(trainer, 4, stop_at=4).train())
    checkpoints = Checkpoints(trainer.ckpt_path, -1)
    checkpoints.settle(load_checkpoint(checkpoints.folder(4)).state, None)  # as one in the middle of a run
    written = load_checkpoint(checkpoints.folder(4))
    assert not written.state.pending and written.state.export is None
    assert with_missing_export(written, trainer, 5) == written, "it is not the last step"
    without = trainer_config(tmp_path, "trainer.hf_save_interval=0")
    assert with_missing_export(written, without, num_steps) == written
    by_hand = Path(trainer.export_path, "global_step_4")
    by_hand.mkdir(parents=True)
    (by_hand / "SHA256SUMS").touch()
    (by_hand / "model.safetensors.index.json").touch()
    assert with_missing_export(written, trainer, num_steps) == written, "export_hf has exported it"
    shutil.rmtree(by_hand)

    loop = Counting(trainer, num_steps)
    loop.resume(with_missing_export(written, trainer, num_steps))
    save_hf = loop.policy.save_hf

    async def save(folder: str) -> None:
        await save_hf(folder)
        Path(folder).mkdir(parents=True)
        for name in (INDEX, SUMS):
            Path(folder, name).write_text("{}")

    loop.policy.save_hf = save  # type: ignore[method-assign]
    asyncio.run(loop.train())
    assert (loop.policy.exported, loop.evaluated, loop.batches) == (["global_step_4"], [4], [])
    settled = load_checkpoint(checkpoints.folder(4))
    assert with_missing_export(settled, trainer, num_steps) == settled and settled.state.export is not None


def test_a_checkpoint_of_another_run_stays_as_it_is(tmp_path: Path):
    here, there = (trainer_config(tmp_path / name, "trainer.ckpt_interval=3") for name in ("here", "there"))
    for trainer in (here, there):
        asyncio.run(Counting(trainer, 7, stop_at=7).train())
    record = Checkpoints(there.ckpt_path, -1).folder(7) / RECORD
    resumed, before = Counting(here, 7), record.read_bytes()
    resumed.run_id = "another"
    checkpoint = load_checkpoint(record.parent)
    resumed.resume(replace(checkpoint, state=replace(checkpoint.state, run_id="another")))
    asyncio.run(resumed.train())
    assert record.read_bytes() == before
    assert load_checkpoint(Checkpoints(here.ckpt_path, -1).folder(7)).state.pending


def test_an_evaluation_that_fails_costs_no_step_and_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=3", "trainer.eval_interval=5")
    failing, resumed = Counting(trainer, 7), Counting(trainer, 7)
    logged: list[int] = []
    monkeypatch.setattr(failing._tracker, "log", lambda step, metrics: logged.append(step))

    async def evaluate() -> Metrics:
        if failing.global_step == 0:
            return {}
        raise RemoteFailed("engine-1 died")

    monkeypatch.setattr(failing, "evaluate", evaluate)
    with pytest.raises(RemoteFailed, match="engine-1 died"):
        asyncio.run(failing.train())
    assert steps(trainer) == [3, 5]
    assert logged == [0, 1, 2, 3, 4, 5], "no later start trains step 5, so none logs it"
    resumed.resume(load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(5)))
    asyncio.run(resumed.train())
    assert resumed.evaluated == [5, 7] and len(resumed.batches) == 2


def test_processes_that_end_with_the_run_cost_it_a_checkpoint_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    loop = Counting(trainer_config(tmp_path, "trainer.ckpt_interval=3"), 7, stop_at=4)
    loop.policy.error, loop.policy.answers = RemoteFailed("policy-0 died"), False
    loop._saved_step, loop.global_step = 3, 3
    loop.stop_at = 1
    asyncio.run(loop.train())
    assert loop.global_step == 4 and "the checkpoint of step 4 could not be written: policy-0 died" in caplog.text


def test_a_resumed_run_trains_on_the_rows_that_are_left_in_their_order(tmp_path: Path):
    """Through the end of an epoch of 5 steps."""
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=4")
    whole = Counting(trainer, 12)
    asyncio.run(whole.train())
    for step in (4, 8):
        resumed = Counting(trainer, 12)
        resumed.resume(load_checkpoint(Checkpoints(trainer.ckpt_path, -1).folder(step)))
        asyncio.run(resumed.train())
        assert resumed.batches == whole.batches[step:] and resumed.global_step == 12


def test_a_checkpoint_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer = trainer_config(tmp_path, "trainer.ckpt_interval=1")
    loop = Counting(trainer, 3)
    asyncio.run(loop.train())
    loop.policy.error, loop._num_steps = RemoteFailed("policy-0: No space left on device"), 4
    with pytest.raises(
        RunIncomplete, match="the checkpoint of step 4, the last one, could not be written: policy-0: No"
    ):
        asyncio.run(loop.train())
    assert steps(trainer) == [1, 2, 3] and not Checkpoints(trainer.ckpt_path, -1).folder(4).exists()
    loop = Counting(trainer_config(tmp_path / "other", "trainer.ckpt_interval=1"), 2)
    loop.policy.error = RemoteFailed("policy-0: No space left on device")
    loop.after_step = lambda: setattr(loop.policy, "error", loop.policy.error if loop.policy.num_steps == 1 else None)
    asyncio.run(loop.train())
    assert "the checkpoint of step 1 could not be written, the run continues: policy-0: No space left" in caplog.text
    loop.policy.error, loop.policy.answers, loop._num_steps = RemoteFailed("policy-0 died"), False, 5
    loop.after_step = None
    with pytest.raises(RemoteFailed):
        asyncio.run(loop.train())


def test_a_folder_that_cannot_be_made_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    loop = Counting(trainer_config(tmp_path, "trainer.ckpt_interval=1", f"trainer.ckpt_path={tmp_path}/file/x"), 2)
    with pytest.raises(RunIncomplete, match="the checkpoint of step 2, the last one, could not be written"):
        asyncio.run(loop.train())
    assert loop.global_step == 2 and "step 1 could not be written, the run continues" in caplog.text
