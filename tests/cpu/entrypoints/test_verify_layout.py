"""The tool that people run before they trust a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from skyrl_train.entrypoints.layout_request import read_request
from skyrl_train.entrypoints.verify_layout import main
from skyrl_train.megatron.model import bridge
from skyrl_train.megatron.model import model as models
from tests.support.families import write_family


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


def test_an_exact_layout_is_called_exact(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([f"model={dense}", "tp=2", "samples=6", f"json={tmp_path / 'numbers.json'}"]) == 0
    printed = capsys.readouterr().out
    assert "TP2 against one process" in printed and "exact up to rounding" in printed
    assert "TP2 against Hugging Face" in printed
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["exact"]
    for difference in (numbers["one process"], numbers["Hugging Face"]):
        assert difference["gradient"] < 5e-6 and len(difference["tensors"]) == 46


def test_layouts_that_agree_with_each_other_and_not_with_hugging_face_are_not_exact(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    load = bridge.load_hf_config

    def with_another_eps(path: str) -> Any:
        config = load(path)
        config.rms_norm_eps = 0.01
        return config

    monkeypatch.setattr(bridge, "load_hf_config", with_another_eps)
    assert main([f"model={dense}", "samples=6"]) == 1
    assert "from Hugging Face" in capsys.readouterr().out


def test_an_unsupported_architecture_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    transformers.PhiConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert main([f"model={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "model_type is 'phi'" in said and "Traceback" not in said


def test_a_wrong_gradient_is_exit_code_1(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(models, "finalize_model_grads", lambda *args, **kwargs: None)
    assert main([f"model={dense}", "dp=2", "samples=6"]) == 1
    assert "not exact: the gradient is off by" in capsys.readouterr().out


def test_a_process_that_fails_is_not_called_inexact(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room [for this]")

    monkeypatch.setattr(models, "finalize_model_grads", fail)
    assert main([f"model={dense}", "dp=2", "samples=6"]) == 2
    assert "MemoryError: no room [for this]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tp=3"], "must divide the model's 4 attention heads"),
        (["pp=5"], "5 stages, more than the model's 4 layers"),
        (["pp=2", "vpp=4"], "8 stages, more than the model's 4 layers"),
        (["vpp=2"], "an interleaved schedule needs a pipeline of at least 2"),
        (["ep=2"], "the model has no experts"),
        (["tpp=2"], "did you mean tp?"),
        (["tp=two"], "tp=two: it must be a whole number of at least 1"),
        (["tp"], "'tp' is not of the form name=value"),
        (["against=kp:2"], "kp is no size"),
        (["dtype=int8"], "it must be float32 or bfloat16"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_before_anything_starts(
    dense: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main([f"model={dense}", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ep=3"], "must divide the model's 4 experts"),
        (["tp=2", "sp=false"], "sequence_parallel is false: a model with experts needs it"),
        (["tp=4", "etp=5", "dp=5"], "must divide the model's moe_intermediate_size 48"),
    ],
)
def test_a_layout_that_cannot_deal_the_experts_is_refused(
    experts: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main([f"model={experts}", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_data_parallelism_is_the_least_that_the_experts_need(experts: Path):
    assert read_request([f"model={experts}", "ep=2"]).layout.world_size == 2
    assert read_request([f"model={experts}", "ep=2", "tp=2"]).layout.world_size == 4
    assert read_request([f"model={experts}", "ep=2", "tp=2", "etp=1"]).layout.world_size == 2
    assert read_request([f"model={experts}", "ep=2", "etp=1", "dp=4"]).layout.world_size == 4


def test_a_model_that_cannot_be_had_is_not_called_inexact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["model=organisation/absent", "tp=2"]) == 2
    assert "neither a folder nor can it be downloaded" in capsys.readouterr().err


def test_the_model_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tp=2"]) == 2
    assert main([f"model={tmp_path / 'absent'}"]) == 2
    said = capsys.readouterr().err
    assert "model=PATH is missing" in said and "there is no such folder" in said
