"""docs/extending.md: its code is that of examples/custom, which tests run."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest

import skyrl_train
from skyrl_train.checks.engines import engine_problems
from skyrl_train.config import load_config
from tests.support.scripted import PARAMS, Script, prompt, sampler
from tests.support.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/extending.md").read_text()
QUOTED = re.findall(r"\[(examples/custom/\w+\.py)\]\([^)]*\)[^`]*?```python\n(.*?)```", PAGE, flags=re.DOTALL)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/custom/{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(("file", "code"), QUOTED, ids=[file for file, _ in QUOTED])
def test_quoted_code_is_that_of_the_file(file: str, code: str):
    """Methods are quoted without their class, so without its indentation."""
    whole = without_blank_lines((ROOT / file).read_text())
    quoted = without_blank_lines(code)
    assert quoted in whole or indent(quoted, "    ") in whole, f"docs/extending.md does not quote {file}"


def without_blank_lines(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


def test_every_example_is_quoted():
    files = {f"examples/custom/{path.name}" for path in (ROOT / "examples/custom").glob("*.py")}
    assert {file for file, _ in QUOTED} == files


def test_the_environment_plays_in_the_default_rollout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/custom"))
    of_digits = prompt("own_environment:Digits")
    with sampler(tiny_tokenizer(), Script(tiny_tokenizer(), "12"), extra={"wanted_digits": 4}) as s:
        played = asyncio.run(s.sample(of_digits, PARAMS))
    assert played.reward == 0.5 and played.turns == 1


def test_the_sink_appends_to_its_table_where_a_run_resumes(tmp_path: Path):
    config = load_config([])
    for steps_done in (0, 1):
        sink = module("own_sink").FileSink(tmp_path, config, steps_done)
        sink.log(steps_done + 1, {"policy/loss": 0.5})
        sink.close()
    assert (tmp_path / "metrics.csv").read_text() == "step,name,value\n1,policy/loss,0.5\n2,policy/loss,0.5\n"


def test_the_subclass_of_an_experiment_changes_the_samples_of_the_default_rollout(monkeypatch: pytest.MonkeyPatch):
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Mine(" in each]
    run: dict[str, Any] = {}
    monkeypatch.setattr(skyrl_train, "run", lambda config, experiment: run.update(config=config, kind=experiment))
    exec(block, {})
    experiment = object.__new__(run["kind"])
    experiment.config = run["config"]
    with sampler(tiny_tokenizer(), Script(tiny_tokenizer(), "12"), extra={"wanted_digits": 4}) as s:
        monkeypatch.setattr(skyrl_train.Experiment, "get_rollout", lambda self, env_pool: s._rollout)
        rollout = experiment.get_rollout(None)
        monkeypatch.syspath_prepend(str(ROOT / "examples/custom"))
        row = prompt("own_environment:Digits")
        (played,) = asyncio.run(rollout(row, PARAMS, s._engines.for_a_rollout(row)))
    assert played.reward == pytest.approx(0.5 - 0.01 * int(played.loss_mask.sum()))


def test_the_example_experiment_is_a_configuration_that_loads():
    config = load_config(["+experiment=custom"], [ROOT / "examples/custom/configs"])
    assert config.extra == {"wanted_digits": 4, "max_batches": 2}
    assert config.trainer.source == "own_source:GroupsThatTeach"
    assert hasattr(module("own_rollout"), config.generator.rollout.partition(":")[2])


def test_the_example_engine_says_what_it_cannot_do_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/custom"))
    wanted = ["generator.eval_sampling_params.stop=[a]", "trainer.placement.colocate_all=true"]
    sampling, sharing = engine_problems(load_config(["generator.backend=own_engine:ENGINE", *wanted]))
    assert "generator.eval_sampling_params has stop" in sampling and "own_engine does not sleep" in sharing
