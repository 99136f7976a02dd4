"""Code from a model's folder is never run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from skyrl_train.checks.engines import engine_argument_problems
from skyrl_train.config import load_config

ROOT = Path(__file__).parents[3] / "skyrl_train"


def calls(file: Path) -> list[ast.Call]:
    """Calls that read a configuration, a tokenizer or a model through transformers."""
    found = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    names = ("from_pretrained", "from_config")
    return [node for node in found if isinstance(node.func, ast.Attribute) and node.func.attr in names]


def test_everything_that_is_read_through_transformers_refuses_remote_code():
    """None, transformers' default, asks a person at the terminal, and runs the code if the answer is yes."""
    checked = 0
    for file in ROOT.rglob("*.py"):
        for call in calls(file):
            given = {keyword.arg: keyword.value for keyword in call.keywords}.get("trust_remote_code")
            assert isinstance(given, ast.Constant) and given.value is False, f"{file.name}:{call.lineno}"
            checked += 1
    assert checked >= 7


@pytest.mark.parametrize(
    "argument",
    [
        "trust_remote_code=true",
        "hf_overrides={auto_map: {AutoModel: m.M}}",
        "speculative_config.trust_remote_code=true",
        "hf_overrides.text_config.auto_map.AutoModel=m.M",
        "code_revision=main",
    ],
)
def test_engine_arguments_cannot_allow_remote_code(argument: str):
    problems = engine_argument_problems(load_config([f"generator.engine_init_kwargs.{argument}"]).generator)
    (problem,) = [problem for problem in problems if "trainer.trust_remote_code=true" in problem]
    assert "generator.engine_init_kwargs." in problem
    assert list(engine_argument_problems(load_config(["generator.engine_init_kwargs.block_size=32"]).generator)) == []
