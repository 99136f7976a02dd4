"""The last lines of a run say where its model is, and how to resume a run that did not finish."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from skyrl_train.config.redaction import secrets_of
from skyrl_train.entrypoints.command import Interrupts, _until_signal
from skyrl_train.entrypoints.ending import last_lines, print_report, resume_command
from skyrl_train.hf.checkpoint import INDEX, SUMS, export_sum
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.trainer.run_state import RECORD, Checkpoints, RunState

MODEL, CHECKPOINT = Path("/runs/a/exports/global_step_4"), Path("/runs/a/checkpoints/global_step_3")


def test_a_finished_run_names_its_model():
    assert last_lines("finished", MODEL, CHECKPOINT, "again", "/elsewhere") == [f"model   {MODEL}"]


def test_an_interrupted_run_names_its_checkpoint_and_the_commands_that_resume_and_export_it():
    assert last_lines("interrupted", None, CHECKPOINT, "again", "/elsewhere") == [
        f"ckpt    {CHECKPOINT}",
        "resume  again",
        f"model   not exported. To export it: python -m skyrl_train.entrypoints.export_hf checkpoint={CHECKPOINT} "
        "export_path=/elsewhere/global_step_3",
    ]


def test_an_export_that_is_there_already_is_not_the_target_of_another(tmp_path: Path):
    """It is of the step before the run was resumed from an earlier one."""
    (tmp_path / "global_step_3").mkdir()
    line = last_lines("finished", None, CHECKPOINT, "again", str(tmp_path))[-1]
    assert line.endswith(f"export_path={tmp_path}/global_step_3_resumed")


def test_an_export_of_the_same_weights_is_the_model(tmp_path: Path):
    """A run that resumed after its export, and ended before its next step."""
    checkpoints, exported = Checkpoints(str(tmp_path), -1), tmp_path / "exports/global_step_3"
    exported.mkdir(parents=True)
    for name in (INDEX, SUMS):
        (exported / name).write_text(name)
    checkpoints.begin(folder := checkpoints.folder(3))
    checkpoints.finish(folder, RunState(3, 3, False, {}, 0, {}, "", {}, export=export_sum(exported)), [])
    lines = last_lines("interrupted", None, folder, "again", str(exported.parent))
    assert lines == [f"ckpt    {folder}", "resume  again", f"model   {exported}"]
    record, intact = folder / RECORD, (folder / RECORD).read_text()
    record.write_text("{")
    assert last_lines("interrupted", None, folder, "again", str(exported.parent))[-1].endswith("_3_resumed")
    record.write_text(intact)
    (exported / SUMS).write_text("others")
    assert last_lines("interrupted", None, folder, "again", str(exported.parent))[-1].endswith("_3_resumed")


def test_a_run_without_a_checkpoint_or_a_model_says_so():
    assert last_lines("failed", None, None, "again", "/elsewhere") == ["ckpt    none: the run cannot be resumed"]
    (line,) = last_lines("finished", None, None, "again", "/elsewhere")
    assert line.startswith("model   neither an export nor a checkpoint was written (trainer.hf_save_interval")


@pytest.mark.parametrize(("status", "lines"), [("finished", 1), ("failed", 0)])
def test_a_run_without_json_lines_has_no_report_and_a_finished_one_says_why(status: str, lines: int, tmp_path: Path):
    console = Console(file=io.StringIO(), width=40)
    print_report(RunDir(tmp_path, io.StringIO()), status, console)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said == ["report  none: it is made from metrics.jsonl (jsonl in trainer.logger)"][:lines]


def test_a_fault_of_the_report_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lines after it say where the model is, or how to resume."""
    (tmp_path / "metrics.jsonl").write_text('{"trainer/global_step": 1}\n')

    def faulty(_: Path) -> None:
        raise KeyError(2)

    monkeypatch.setattr("skyrl_train.tracking.report.report.write_report", faulty)
    console = Console(file=io.StringIO())
    print_report(RunDir(tmp_path, io.StringIO()), "finished", console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said == "no report: KeyError(2), a fault of the report\n"


def test_the_resuming_command_is_the_old_one_without_its_checkpoint_and_its_secrets():
    argv = ["+experiment=a", "trainer.resume_mode=from_path", "+trainer.resume_path=x", "extra.note='a b'"]
    argv.append("generator.http_api_key=hidden")
    command = resume_command(
        "skyrl_train.entrypoints.main_base", argv, secrets_of({"http_api_key": "hidden"}), has_path=True
    )
    assert command == (
        "python -m skyrl_train.entrypoints.main_base +experiment=a 'extra.note='\"'\"'a b'\"'\"'' "
        "'generator.http_api_key=***' trainer.resume_mode=latest trainer.resume_path=null"
    )
    assert resume_command("m", ["a=1"], secrets_of({}), has_path=False) == "python -m m a=1 trainer.resume_mode=latest"
    assert resume_command("m", None, secrets_of({}), has_path=False) == "run it again with trainer.resume_mode=latest"


def test_only_before_training_begins_does_an_exit_stand_for_a_signal(tmp_path: Path):
    """Ray's own handler of SIGTERM exits while it starts; later it is a call of sys.exit in code of the step."""

    async def exits(run_dir: RunDir) -> None:
        sys.exit(3)

    def ended(loop: object) -> int | None:
        config = SimpleNamespace(trainer=SimpleNamespace(timeout_s=100.0))
        training: Any = SimpleNamespace(config=config, is_done=False, run=exits, loop=loop)
        console = Console(file=io.StringIO())
        return asyncio.run(_until_signal(training, RunDir(tmp_path, None), console, secrets_of({}), Interrupts()))

    assert ended(None) == signal.SIGTERM
    with pytest.raises(RuntimeError, match=r"a call of sys.exit\(3\) ended the step"):
        ended(object())
