"""The command `skyrl-train` runs the programs by short names."""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import skyrl_train
from skyrl_train.entrypoints import cli

ROOT = Path(__file__).parents[3]


def test_the_installed_command_is_the_function_here():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["skyrl-train"].split(":")
    assert getattr(importlib.import_module(module), function) is cli.main
    assert skyrl_train.__version__ == version("skyrl_train")


def test_every_command_is_a_program():
    for module, _ in cli.PROGRAMS.values():
        assert callable(importlib.import_module(f"skyrl_train.entrypoints.{module}").main)


def test_a_command_runs_its_program_with_the_other_arguments(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "checkpiont=x"])
    assert (
        ended.value.code == 2 and "checkpiont=x: the arguments are checkpoint, export_path" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "usage: skyrl-train COMMAND"),
        (["--help"], 0, "evaluate a model or a checkpoint (skyrl_train.entrypoints.main_generate)"),
        (["--version"], 0, skyrl_train.__version__),
        (["generat"], 2, "error: skyrl-train generat: did you mean generate?"),
        (["xyz"], 2, "error: skyrl-train xyz: unknown command."),
    ],
)
def test_help_version_and_misspelt_commands(
    arguments: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == code and expected in printed.out + printed.err
