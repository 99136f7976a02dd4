"""The run's folder: one run each, nothing lost, nothing mixed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skyrl_train.config import load_config, to_yaml
from skyrl_train.config.rl import RL
from skyrl_train.tracking.changes import changed_values
from skyrl_train.tracking.run_dir import RunDir, create_run_dir, read_record, versions

BASE_YAML = """
trainer:
  run_name: test_run
  run_dir: runs/${trainer.run_name}
  lr: 1e-6
  betas: [0.9, 0.999]
engine_kwargs: {}
stop: null
"""


def finished_run(path: Path, note: str, status: str = "finished") -> RunDir:
    run_dir = create_run_dir(path, path.name, f"note: {note}\n", {})
    run_dir.finish(status)
    return run_dir


def notes(folder: Path) -> dict[str, str]:
    return {path.parent.name: yaml.safe_load(path.read_text())["note"] for path in folder.glob("*/config.yaml")}


def test_run_folder_holds_the_config_as_used_and_a_record(tmp_path: Path):
    run_dir = create_run_dir(tmp_path / "runs" / "first", "first", "a: 1  # kept as it is\n", {"a": 1})
    assert run_dir.config.read_text() == "a: 1  # kept as it is\n"
    assert run_dir.logs.is_dir()
    record = read_record(run_dir.path)
    assert (record["run_name"], record["status"], record["changes"]) == ("first", "running", {"a": 1})
    assert record["versions"] == versions() and {"python", "torch"} <= versions().keys()
    run_dir.finish("interrupted")
    record = read_record(run_dir.path)
    assert record["status"] == "interrupted" and record["ended_unix_s"] >= record["started_unix_s"]


def test_repeated_run_name_keeps_the_plain_name_for_the_newest_run(tmp_path: Path):
    for note in ("oldest", "middle", "newest"):
        finished_run(tmp_path / "quickstart", note)
    assert notes(tmp_path) == {"quickstart": "newest", "quickstart.2": "middle", "quickstart.1": "oldest"}


def test_numbers_of_earlier_runs_keep_rising_after_one_was_deleted(tmp_path: Path):
    for note in ("a", "b"):
        finished_run(tmp_path / "q", note)
    (tmp_path / "q.1").rename(tmp_path / "q.7")
    finished_run(tmp_path / "q", "c")
    assert notes(tmp_path) == {"q": "c", "q.8": "b", "q.7": "a"}


def test_new_run_inherits_no_file_of_an_earlier_one(tmp_path: Path):
    finished_run(tmp_path / "q", "old")
    (tmp_path / "q" / "metrics.jsonl").write_text("{}\n")
    run_dir = finished_run(tmp_path / "q", "new")
    assert not (run_dir.path / "metrics.jsonl").exists()
    assert (tmp_path / "q.1" / "metrics.jsonl").read_text() == "{}\n"
    assert str(run_dir) == f"{tmp_path / 'q'}; the earlier run of this name is now in {tmp_path / 'q.1'}"


def test_run_that_was_killed_is_kept_like_any_other(tmp_path: Path):
    program = (
        "import os, pathlib, sys; from skyrl_train.tracking.run_dir import create_run_dir;"
        "create_run_dir(pathlib.Path(sys.argv[1]), 'q', 'note: killed\\n', {}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "q")], check=False)
    finished_run(tmp_path / "q", "next")
    assert notes(tmp_path) == {"q": "next", "q.1": "killed"}
    assert read_record(tmp_path / "q.1")["status"] == "running"


def test_a_resumed_run_adds_to_its_folder_and_to_the_list_of_its_starts(tmp_path: Path):
    first = finished_run(tmp_path / "q", "first", "interrupted")
    (first.path / "metrics.jsonl").write_text("{}\n")
    for note in ("second", "third"):
        run_dir = create_run_dir(tmp_path / "q", "q", f"note: {note}\n", {"a": 1}, resumes=True)
        assert run_dir.path == first.path and (first.path / "metrics.jsonl").read_text() == "{}\n"
        with pytest.raises(ValueError, match="used by a run in progress"):
            create_run_dir(tmp_path / "q", "q", "note: beside\n", {}, resumes=True)
        run_dir.lock.close()  # as when it is killed
    assert notes(tmp_path) == {"q": "third"}
    record = read_record(tmp_path / "q")
    assert [one["status"] for one in record["earlier"]] == ["interrupted", "running"]
    assert (record["status"], record["changes"]) == ("running", {"a": 1}) and "ended_unix_s" not in record


def test_a_run_resumed_elsewhere_makes_its_folder_and_takes_none_that_is_no_runs(tmp_path: Path):
    assert create_run_dir(tmp_path / "new", "q", "", {}, resumes=True).logs.is_dir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not the folder of a run"):
        create_run_dir(tmp_path / "thesis", "q", "", {}, resumes=True)


def test_folder_of_a_run_that_is_going_on_is_refused(tmp_path: Path):
    running = create_run_dir(tmp_path / "q", "q", "note: first\n", {})
    with pytest.raises(ValueError, match=r"in progress \(process \d+\).*Choose another trainer.run_name"):
        create_run_dir(tmp_path / "q", "q", "note: second\n", {})
    assert notes(tmp_path) == {"q": "first"}
    running.finish("finished")
    finished_run(tmp_path / "q", "second")


def test_folder_that_is_no_runs_is_neither_moved_nor_written_into(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not the folder of a run"):
        create_run_dir(tmp_path, "q", "", {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_empty_folder_is_used(tmp_path: Path):
    assert create_run_dir(tmp_path, "q", "", {}).path == tmp_path.resolve()


def test_folder_that_cannot_be_made_is_an_error_that_names_the_key(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trainer.run_dir is .*cannot be created"):
        create_run_dir(tmp_path / "file" / "run", "q", "", {})


def test_folder_of_a_start_that_a_full_disk_ended_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, record: object) -> None:
        (path / ".run.json.draft").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.tracking.run_dir.write_record", full)
        with pytest.raises(ValueError, match="No space left"):
            create_run_dir(tmp_path / "full", "full", "", {})
    create_run_dir(tmp_path / "full", "full", "", {}).finish("finished")
    assert read_record(tmp_path / "full")["status"] == "finished"
    assert not (tmp_path / "full.1").exists()


def test_a_start_that_a_full_disk_ended_leaves_the_earlier_run_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, record: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    finished_run(tmp_path / "run", "old")
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.tracking.run_dir.write_record", full)
        with pytest.raises(ValueError, match="No space left"):
            create_run_dir(tmp_path / "run", "run", "", {})
    assert notes(tmp_path) == {"run": "old"}


def test_linked_folder_is_renamed_beside_its_target(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "q").symlink_to(tmp_path / "disk" / "q")
    (tmp_path / "disk" / "q").mkdir()
    for note in ("old", "new"):
        finished_run(tmp_path / "q", note)
    assert notes(tmp_path / "disk") == {"q": "new", "q.1": "old"}


def test_record_that_was_cut_short_counts_as_none(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"run_name": ')
    assert read_record(tmp_path) == {}


def test_changes_name_every_value_that_differs_by_its_dotted_key():
    config = """
    trainer: {run_name: test_run, run_dir: runs/test_run, lr: 3.0e-4, betas: [0.9, 0.95]}
    engine_kwargs: {max_model_len: 32}
    stop: null
    """
    assert changed_values(config, BASE_YAML) == {
        "trainer.lr": 3e-4,
        "trainer.betas": [0.9, 0.95],
        "engine_kwargs.max_model_len": 32,
    }


def test_key_that_follows_another_is_a_change_only_where_it_departs():
    config = "trainer: {{run_name: mine, run_dir: {run_dir}, lr: 1.0e-6, betas: [0.9, 0.999]}}\n"
    config += "engine_kwargs: {{}}\nstop: null"
    assert changed_values(config.format(run_dir="runs/mine"), BASE_YAML) == {"trainer.run_name": "mine"}
    assert changed_values(config.format(run_dir="elsewhere"), BASE_YAML) == {
        "trainer.run_name": "mine",
        "trainer.run_dir": "elsewhere",
    }


def test_text_that_looks_like_an_interpolation_is_only_text():
    config = "trainer: {run_name: '\\${x', run_dir: 'runs/\\${x', lr: 1.0e-6, betas: [0.9, 0.999]}\n"
    config += "engine_kwargs: {}\nstop: '${y}'"
    assert changed_values(config, BASE_YAML) == {"trainer.run_name": "\\${x", "stop": "${y}"}


def test_base_config_changes_nothing_and_one_override_is_one_change():
    base_yaml = RL.base_yaml()
    assert changed_values(to_yaml(load_config()), base_yaml) == {}
    config = load_config(["trainer.policy.optimizer_config.lr=3e-4", "trainer.run_name=mine", "trainer.bf16=false"])
    assert changed_values(to_yaml(config), base_yaml) == {
        "trainer.policy.optimizer_config.lr": 3e-4,
        "trainer.run_name": "mine",
        "trainer.bf16": False,
    }
