"""The command line of an export, beside a run that deletes checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from skyrl_train.config import load_config
from skyrl_train.entrypoints import command, export_hf
from skyrl_train.file_sum import FileSum, sum_of
from skyrl_train.hf.identity import identity
from skyrl_train.megatron import export_saved
from skyrl_train.trainer import run_state
from skyrl_train.trainer.from_config import model_of
from skyrl_train.trainer.run_state import Checkpoints, RunState
from tests.support.families import write_family


@pytest.mark.parametrize("phase", ["while it is verified", "while the ranks load it"])
def test_a_named_checkpoint_that_its_run_deletes_is_reported_as_deleted(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    checkpoints = Checkpoints(str(tmp_path), 1)
    checkpoints.begin(folder := checkpoints.folder(1))
    (folder / "rank_0.pt").write_text("state")
    (tmp_path / "model").mkdir()
    model = model_of(load_config([f"trainer.policy.model.path={tmp_path}/model"]).trainer)
    checkpoints.finish(folder, RunState(1, 1, False, {}, 1, {}, "", model), [sum_of(folder / "rank_0.pt")])
    verify = run_state.problems_of

    def deleted_before(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
        shutil.rmtree(folder)
        return verify(folder, files)

    def deleted_during(saved: export_saved.SavedPolicy, target: str) -> None:
        shutil.rmtree(saved.folder)
        raise RuntimeError("rank 0: No such file or directory")

    if phase == "while it is verified":
        monkeypatch.setattr(run_state, "problems_of", deleted_before)
    monkeypatch.setattr(export_saved, "export_saved", deleted_during)
    code = export_hf.main([f"checkpoint={folder}", f"export_path={tmp_path}/exported"])
    assert code == (2 if phase == "while it is verified" else 1)
    assert f"error: {folder} was deleted while it was read" in capsys.readouterr().out


def test_a_checkpoint_without_its_frozen_routers_is_not_exported_with_other_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    source = write_family("qwen3_moe", tmp_path / "model")
    megatron = "trainer.policy.megatron_config.freeze_moe_router=true"
    trainer = load_config([f"trainer.policy.model.path={source}", megatron]).trainer
    kept = model_of(trainer) | identity(str(source), has_frozen_weights=True)
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), 1)
    checkpoints.begin(folder := checkpoints.folder(1))
    checkpoints.finish(folder, RunState(1, 1, False, {}, 1, {}, "", kept), [])
    monkeypatch.setattr(export_saved, "export_saved", lambda *arguments: None)
    assert export_hf.main([f"checkpoint={folder}", f"export_path={tmp_path}/exported"]) == 0
    write_family("qwen3_moe", source, initializer_range=0.5)
    assert export_hf.main([f"checkpoint={folder}", f"export_path={tmp_path}/exported"]) == 2
    assert f"{source} has changed since its run began: it has other weights. Restore it" in capsys.readouterr().out


def test_a_file_and_a_folder_without_permission_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    (tmp_path / "file").touch()
    assert export_hf.main([f"checkpoint={tmp_path}/file"]) == 2
    assert f"checkpoint is {tmp_path}/file: it is a file. Name the folder" in capsys.readouterr().out

    def refused(path: Path) -> bool:  # root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    assert export_hf.main([f"checkpoint={tmp_path}"]) == 2
    assert f"error: [Errno 13] Permission denied: '{tmp_path}/checkpoint.json'" in capsys.readouterr().out


def test_a_bucket_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), 1)
    checkpoints.begin(folder := checkpoints.folder(1))
    checkpoints.finish(folder, RunState(1, 1, False, {}, 0, {}, "", {}), [])
    assert export_hf.main([f"checkpoint={folder}", "export_path=gs://bucket/m"]) == 2
    assert "export_path is gs://bucket/m: only local or shared folders" in capsys.readouterr().out
