"""The forecast on the command line and before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from skyrl_train.config import load_config
from skyrl_train.device.kinds import device_kind
from skyrl_train.entrypoints.plan import before_run, main
from skyrl_train.forecast.shapes import model_config


def test_the_command_prints_memory_times_and_proposals(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "plan.json"
    assert main(["plan.shape=qwen3-0.6b", "plan.device=h200", f"plan.json_file={file}"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "0.60 billion parameters",
        "KV cache",
        "optimizer",
        "weight sync",
        "fastest: as given",
        "max_num_seqs=1024, because",
    ):
        assert expected in printed
    made = json.loads(file.read_text())
    assert made["choices"]["trainer.max_tokens_per_microbatch"] == 16_384
    assert made["fits"] and made["proposals"][0]["overrides"] == []
    assert {phase["phase"] for phase in made["phases"]} == {"generation", "update", "reference"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("plan.device=h300", "plan.device is h300: an unknown kind of GPU"),
        ("plan.shape=qwen9", "plan.shape is qwen9: there is no such shape"),
        ("trainer.policy.megatron_config.tensor_model_parallel_size=2", "not a multiple of"),
    ],
)
def test_what_cannot_be_forecast_is_an_error(override: str, expected: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan.device=h200", "plan.shape=qwen3-0.6b", override]) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")


def test_a_run_on_gpus_prints_the_forecast_and_refuses_what_cannot_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = load_config(["trainer.policy.model.path=qwen3"])
    assert before_run.fitted(config, model_config("qwen3-8b"), Console()) is config  # without a GPU
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(before_run, "device_type", lambda: "cuda")
    monkeypatch.setattr(before_run, "this_device", lambda: device_kind("NVIDIA H200"))
    fitted = before_run.fitted(config, model_config("qwen3-0.6b"), Console())
    printed = capsys.readouterr().out
    assert "GiB of 139.8 by the forecast (one rank)" in printed
    assert "chose   for H200: enforce_eager=false, because" in printed
    assert fitted.trainer.max_tokens_per_microbatch == 16_384 and fitted.generator.max_num_batched_tokens == 16_384
    monkeypatch.setattr(before_run, "this_device", lambda: device_kind("NVIDIA H100 80GB HBM3"))
    with pytest.raises(ValueError, match=r"update needs at least .* This fits: trainer\.placement\.policy_num_gpus"):
        before_run.fitted(config, model_config("qwen3-8b"), Console())
