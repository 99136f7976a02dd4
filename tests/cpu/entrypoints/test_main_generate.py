"""Evaluation without training, with engines that read their answers from a script."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from skyrl_train.config import load_config
from skyrl_train.entrypoints import command, generation, main_generate
from skyrl_train.hf.checkpoint import INDEX, SUMS, export_sum
from skyrl_train.tracking.jsonl import read_json_lines
from skyrl_train.trainer.from_config import model_of
from skyrl_train.trainer.run_state import Checkpoints, RunState
from tests.support.jobs import write_world
from tests.support.scripted import Script

ARGUMENTS = ("+experiment=tiny", "data.val_data=[rows.jsonl]", "generator.eval_n_samples_per_prompt=4")


@pytest.fixture(scope="module")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("generate") / "world", num_rows=6)


@pytest.fixture
def served(made_world: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models of the engines that were started; each prompt's samples are 1, 12, 1 and 1 in turn."""
    monkeypatch.chdir(made_world)
    monkeypatch.syspath_prepend(str(made_world))
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    paths: list[str] = []

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(has_gpus=False)

    async def launch_engines(config: Any, cluster: Any, **arguments: Any) -> Any:
        paths.append(config.trainer.policy.model.path)
        assert config.trainer.policy.model.lora.rank == 0, "engines serve what is in the folder"

        async def stop() -> None:
            paths.append("stopped")

        script = Script(AutoTokenizer.from_pretrained(made_world / "model"), "1", "12", "1", "1")
        return SimpleNamespace(engines=SimpleNamespace(generate=script), stop=stop)

    monkeypatch.setattr(generation, "connect", connect)
    monkeypatch.setattr(generation, "launch_engines", launch_engines)
    return paths


def test_a_model_is_scored_with_error_bars_and_every_sample_is_kept(
    made_world: Path, served: list[str], capsys: pytest.CaptureFixture[str]
):
    code = main_generate.main([*ARGUMENTS, "trainer.run_name=plain", "environment.pass_threshold=0.2"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert served == ["model", "stopped"]
    run_dir = made_world / "runs/plain_eval"
    (row,) = read_json_lines(run_dir / "metrics.jsonl")
    scores = {name: value for name, value in row.items() if name.startswith("eval/sums/")}
    # Rewards are 1/8, and 2/8 once per prompt, which alone is above the threshold.
    assert scores == pytest.approx(
        {
            "eval/sums/avg_score": 1.25 / 8,
            "eval/sums/avg_score_stderr": 0.0,
            "eval/sums/pass_at_1": 1 / 4,
            "eval/sums/pass_at_1_stderr": 0.0,
            "eval/sums/pass_at_2": 1 / 2,
            "eval/sums/pass_at_2_stderr": 0.0,
            "eval/sums/pass_at_4": 1.0,
            "eval/sums/pass_at_4_stderr": 0.0,
            "eval/sums/mean_positive_reward": 1.25 / 8,
        }
    )
    rows = read_json_lines(run_dir / "evaluations/global_step_0.jsonl")
    assert len(rows) == 24 and {row["uid"] for row in rows} == {str(uid) for uid in range(6)}
    assert pq.read_table(run_dir / "evaluations/global_step_0.parquet").num_rows == 24
    assert "6 prompts x 4 samples of rows.jsonl" in printed and "pass@4" in printed and "0.2500 ± 0.0000" in printed
    assert printed.splitlines()[-1] == f"samples {run_dir}/evaluations/global_step_0.parquet"
    assert not (run_dir / "report.html").exists()
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"


def write_checkpoint(world: Path, *, is_exported: bool) -> Path:
    """Of step 2 of the run `trained`."""
    shutil.rmtree(world / "runs/trained", ignore_errors=True)
    checkpoints = Checkpoints("runs/trained/checkpoints", 1)
    checkpoints.begin(folder := checkpoints.folder(2))
    model = model_of(load_config([f"trainer.policy.model.path={world}/model"]).trainer)
    exported = world / "runs/trained/exports/global_step_2"
    if is_exported:
        shutil.copytree(world / "model", exported)
        (exported / INDEX).write_text("{}")
        (exported / SUMS).write_text("digests of all files")
    checkpoints.finish(folder, RunState(2, 4, False, {}, 0, {}, "", model, export=export_sum(exported)), [])
    return folder


def test_a_checkpoint_is_evaluated_by_the_export_of_its_run(
    made_world: Path, served: list[str], caplog: pytest.LogCaptureFixture
):
    write_checkpoint(made_world, is_exported=True)
    own = ["trainer.run_name=trained", "trainer.resume_mode=latest", "trainer.bf16=false"]
    assert main_generate.main([*ARGUMENTS, *own]) == 0
    assert "trainer.bf16 is false, and was true in the run of" in caplog.text
    assert "set trainer.bf16=true" in caplog.text
    assert served == [f"{made_world}/runs/trained/exports/global_step_2", "stopped"]
    assert (made_world / "runs/trained_eval/evaluations/global_step_2.jsonl").exists()
    assert (made_world / "runs/trained/checkpoints/global_step_2").exists(), "the run's folder stays where it is"


def test_an_export_of_other_weights_of_the_step_is_not_evaluated(
    made_world: Path, served: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The run was resumed from an earlier step, and its new export failed or was not due."""
    folder = write_checkpoint(made_world, is_exported=True)
    (folder.parent.parent / "exports/global_step_2" / SUMS).write_text("other digests")
    own_export = AsyncMock(return_value=SimpleNamespace(returncode=0, communicate=AsyncMock(return_value=(b"", b""))))
    monkeypatch.setattr(generation.asyncio, "create_subprocess_exec", own_export)
    assert main_generate.main([*ARGUMENTS, "trainer.run_name=trained", "trainer.resume_mode=latest"]) == 0
    assert served == [f"{made_world}/runs/trained_eval/model", "stopped"]


def test_a_model_named_beside_a_checkpoint_of_another_one_is_refused(
    made_world: Path, served: list[str], capsys: pytest.CaptureFixture[str]
):
    write_checkpoint(made_world, is_exported=True)
    arguments = [*ARGUMENTS, "trainer.run_name=trained", "trainer.resume_mode=latest"]
    (made_world / "other").mkdir()
    assert main_generate.main([*arguments, "trainer.policy.model.path=other"]) == 2
    expected = (
        f"trainer.policy.model.path is other and trainer.resume_mode is set: the run of {made_world}/runs/trained"
    )
    assert expected in capsys.readouterr().out and not served
    assert main_generate.main([*arguments, "trainer.policy.model.path=model"]) == 0, "the same folder, relative"


def test_a_checkpoint_that_was_not_exported_is_exported_for_the_evaluation(
    made_world: Path, served: list[str], monkeypatch: pytest.MonkeyPatch
):
    folder = write_checkpoint(made_world, is_exported=False)
    commands: list[tuple[str, ...]] = []

    async def run(*arguments: str, **pipes: Any) -> Any:
        commands.append(arguments[1:])

        async def communicate() -> tuple[bytes, bytes]:
            return b"", b"rank 0 failed" if len(commands) > 1 else b""

        return SimpleNamespace(returncode=len(commands) - 1, communicate=communicate)

    monkeypatch.setattr(generation.asyncio, "create_subprocess_exec", run)
    arguments = [*ARGUMENTS, "trainer.run_name=again", "trainer.resume_mode=from_path", f"trainer.resume_path={folder}"]
    assert main_generate.main(arguments) == 0
    target = f"{made_world}/runs/again_eval/model"
    exporting = ("-m", "skyrl_train.entrypoints.export_hf", f"checkpoint={folder}", f"export_path={target}")
    assert commands == [exporting] and served == [target, "stopped"]
    assert main_generate.main(arguments) == 1, "no engine starts for an export that failed"
    assert served == [target, "stopped"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.val_data=[]"], "data.val_data is empty: nothing to evaluate"),
        (["data.val_data=[gone.jsonl]"], "data.val_data contains gone.jsonl: there is no such file in"),
        (["generator.run_engines_locally=false"], "which weights a running server serves is only known after a weight"),
        (
            ["trainer.resume_mode=latest"],
            "it does not exist. Name the folder of a checkpoint, or of a run that has one",
        ),
        (["trainer.policy.model.path=./gone"], "trainer.policy.model.path is ./gone: there is no such folder in"),
        (["trainer.policy.model.lora={rank: 4, path: x}"], "engines are started with merged weights only"),
        (["trainer.max_prompt_length=1"], "no prompt of rows.jsonl is that short"),
        (
            ["trainer.resume_mode=latest", "trainer.ckpt_path=runs/own/checkpoints", "trainer.run_dir=runs/own"],
            "own: it holds checkpoints or exports of a training run. Choose another folder for the evaluation",
        ),
    ],
    ids=lambda value: value[-1][:30] if isinstance(value, list) else "",
)
def test_what_cannot_be_evaluated_is_one_message(
    made_world: Path, served: list[str], arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    if "trainer.run_dir=runs/own" in arguments:
        folder = write_checkpoint(made_world, is_exported=False)
        shutil.copytree(folder, "runs/own/checkpoints/global_step_2")
    assert main_generate.main([*ARGUMENTS, "trainer.run_name=errors", *arguments]) == 2
    printed = capsys.readouterr().out
    assert expected in printed and printed.count("error: ") == 1 and not served
