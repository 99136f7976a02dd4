"""examples/notebook.ipynb runs, cell by cell, with a run that only writes what a run leaves behind."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints import command

NOTEBOOK = Path(__file__).parents[3] / "examples/notebook.ipynb"


def test_every_cell_of_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started: list[Any] = []

    def run(training: Any, config: Any, *arguments: Any) -> command.Ended:
        started.append(config)
        (folder := Path(config.trainer.run_dir)).mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"trainer/global_step": 0, "eval/all/avg_score": 0.5}\n')
        (folder / "samples.jsonl").write_text('{"prompt": "1+1=", "response": "2", "reward": 1.0}\n')
        return command.Ended(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "prepare", lambda training, config: None)
    monkeypatch.setattr("skyrl_train.api.COMMAND", command.Command(program=None, check=lambda *each: None, run=""))  # type: ignore[arg-type]
    names: dict[str, Any] = {}

    async def cells() -> None:
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                code = compile("".join(cell["source"]), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if inspect.iscoroutine(running := eval(code, names)):
                    await running

    asyncio.run(cells())
    assert started[0].trainer.max_training_steps == 20
    assert names["run_folder"] == tmp_path / "runs/quickstart" and "1+1= 2 1.0" in capsys.readouterr().out
