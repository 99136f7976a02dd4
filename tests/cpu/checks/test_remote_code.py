"""Code from a model's folder runs only if trainer.trust_remote_code allows it, and then in driver and engines alike."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from skyrl_train.checks.engines import engine_argument_problems
from skyrl_train.checks.tokenizer import check_tokenizer, load_tokenizer
from skyrl_train.cluster.pool.settings import all_engine_settings
from skyrl_train.config import load_config
from skyrl_train.engines.settings import engine_arguments
from skyrl_train.tasks.tiny import VOCABULARY
from tests.support.remote_code import write_model_with_code
from tests.support.tiny import tiny_tokenizer, write_tiny_model

KEY = "trainer.policy.model.path"
ROOT = Path(__file__).parents[3] / "skyrl_train"


def calls(file: Path) -> list[ast.Call]:
    """Calls that read a configuration, a tokenizer or a model through transformers."""
    found = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    names = ("from_pretrained", "from_config")
    return [node for node in found if isinstance(node.func, ast.Attribute) and node.func.attr in names]


def test_everything_that_is_read_through_transformers_says_whether_remote_code_may_run():
    """None, transformers' default, asks a person at the terminal, and runs the code if the answer is yes. What it says
    is False, or the key.
    """
    checked = 0
    for file in ROOT.rglob("*.py"):
        for call in calls(file):
            given = {keyword.arg: keyword.value for keyword in call.keywords}.get("trust_remote_code")
            is_key = given is not None and ast.unparse(given).rpartition(".")[2] == "trust_remote_code"
            is_false = isinstance(given, ast.Constant) and given.value is False
            assert is_false or is_key, f"{file.name}:{call.lineno}"
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_with_code(tmp_path_factory.mktemp("code") / "model"))


def test_a_tokenizer_that_is_code_is_refused_with_the_key_that_allows_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "log"
    monkeypatch.setenv("CHARACTERS_LOG", str(log))
    with pytest.raises(ValueError) as caught:
        load_tokenizer(model, KEY, False)
    assert str(caught.value) == (
        f"{KEY} is {model}: its tokenizer is Python code in this folder (tokenization_characters.Characters), which is "
        "not run. Set trainer.trust_remote_code=true if you trust its authors, or use a copy of the model with a "
        "tokenizer.json that transformers reads"
    )
    assert not log.exists()
    tokenizer = load_tokenizer(model, KEY, True)
    assert log.exists() and type(tokenizer).__name__ == "Characters"
    check_tokenizer(tokenizer, len(VOCABULARY), model)
    text = "12+34=46"
    assert tokenizer.encode(text, add_special_tokens=False) == tiny_tokenizer().encode(text, add_special_tokens=False)


def test_a_converted_tokenizer_needs_no_code(model: str, tmp_path: Path):
    folder = write_tiny_model(tmp_path / "converted")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_characters.Characters", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(folder), KEY, False).encode("12") == tiny_tokenizer().encode("12")


@pytest.mark.parametrize("allowed", [False, True])
def test_engines_receive_the_key(model: str, allowed: bool):
    overrides = [f"{KEY}={model}", f"trainer.trust_remote_code={allowed}", "generator.kv_cache_memory_gb=0.1"]
    (settings,) = all_engine_settings(load_config(overrides), 64, "shm")
    assert engine_arguments(settings, "cpu")["trust_remote_code"] is allowed
