"""The tool that people run before they trust a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from skyrl_train.config import ConfigError
from skyrl_train.config.rl import VERIFY
from skyrl_train.entrypoints.verify_layout import checked_layouts, main
from skyrl_train.megatron.model import bridge
from skyrl_train.megatron.optimizer import optimizer as optimizers
from tests.support.families import write_family

SHORT = {
    "model": "trainer.policy.model.path",
    "tp": "trainer.policy.megatron_config.tensor_model_parallel_size",
    "pp": "trainer.policy.megatron_config.pipeline_model_parallel_size",
    "vpp": "trainer.policy.megatron_config.virtual_pipeline_model_parallel_size",
    "ep": "trainer.policy.megatron_config.expert_model_parallel_size",
    "etp": "trainer.policy.megatron_config.expert_tensor_parallel_size",
    "sp": "trainer.policy.megatron_config.sequence_parallel",
    "ranks": "verify.num_ranks",
    "samples": "verify.num_samples",
    "json": "verify.json_file",
    "against_tp": "verify.against.tensor_model_parallel_size",
}


def overrides(**values: object) -> list[str]:
    return [f"{SHORT[name]}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


def test_an_exact_layout_is_called_exact(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(overrides(model=dense, tp=2, samples=6, json=tmp_path / "numbers.json")) == 0
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
    assert main(overrides(model=dense, samples=6)) == 1
    assert "from Hugging Face" in capsys.readouterr().out


def test_an_unsupported_architecture_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    transformers.PhiConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert main(overrides(model=tmp_path)) == 2
    said = capsys.readouterr().err
    assert "model_type is 'phi'" in said and "Traceback" not in said


def test_a_wrong_gradient_is_exit_code_1(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(optimizers, "finalize_model_grads", lambda *args, **kwargs: None)
    assert main(overrides(model=dense, ranks=2, samples=6)) == 1
    assert "not exact: the gradient is off by" in capsys.readouterr().out


def test_a_process_that_fails_is_not_called_inexact(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room [for this]")

    monkeypatch.setattr(optimizers, "finalize_model_grads", fail)
    assert main(overrides(model=dense, ranks=2, samples=6)) == 2
    assert "MemoryError: no room [for this]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tp": 3}, "must divide the model's 4 attention heads"),
        ({"pp": 5}, "5 stages: more than the model's 4 layers"),
        ({"pp": 2, "vpp": 4}, "8 stages: more than the model's 4 layers"),
        ({"vpp": 2}, "an interleaved schedule needs a pipeline of at least 2"),
        ({"ep": 2}, "the model has no experts"),
        ({"tp": "two"}, "expected int"),
        ({"tp": 2, "ranks": 3}, "verify.num_ranks is 3 ranks: not a multiple"),
        ({"against_tp": 3}, "verify.against.tensor_model_parallel_size is 3: it must divide"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_before_anything_starts(
    dense: Path, values: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(overrides(model=dense, **values)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"ep": 3}, "must divide the model's 4 experts"),
        ({"tp": 2, "sp": "false"}, "sequence_parallel is false: a model with experts needs it"),
        ({"tp": 4, "etp": 5}, "must divide the model's moe_intermediate_size 48"),
    ],
)
def test_a_layout_that_cannot_distribute_the_experts_is_refused(
    experts: Path, values: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(overrides(model=experts, **values)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_settings_that_hugging_face_lacks_are_left_out_and_named(experts: Path, capsys: pytest.CaptureFixture[str]):
    megatron = "trainer.policy.megatron_config"
    trained = [f"{megatron}.moe_aux_loss_coeff=0.5", f"{megatron}.freeze_moe_router=true"]
    trained.append("trainer.policy.model.lora.rank=8")
    assert main([*overrides(model=experts, samples=4), *trained]) == 0
    keys = f"{megatron}.moe_aux_loss_coeff, {megatron}.freeze_moe_router, trainer.policy.model.lora"
    assert f"left out of the comparison: {keys}\n" in capsys.readouterr().out


def test_a_misspelt_key_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]):
    assert main(["verify.num_sample=3"]) == 2
    assert "did you mean verify.num_samples?" in capsys.readouterr().err


def test_without_ranks_a_layout_has_the_fewest_that_the_experts_allow(experts: Path):
    def ranks(**values: object) -> int:
        return checked_layouts(VERIFY.load(overrides(model=experts, **values)))[0].num_ranks

    assert ranks(ep=2) == 2
    assert ranks(ep=2, tp=2) == 4
    assert ranks(ep=2, tp=2, etp=1) == 2
    assert ranks(ep=2, etp=1, ranks=4) == 4


def test_the_layout_to_compare_with_has_its_own_sizes_and_the_other_settings(experts: Path):
    values = overrides(model=experts, pp=2, sp="false", against_tp=1)
    kwargs = "trainer.policy.megatron_config.transformer_config_kwargs"
    first, against = checked_layouts(VERIFY.load([*values, f"{kwargs}.num_layers_in_first_pipeline_stage=1"]))
    assert (first.sizes, against.sizes) == ("PP2", "one process")
    assert not against.megatron.sequence_parallel and not against.megatron.transformer_config_kwargs
    assert first.megatron.transformer_config_kwargs == {"num_layers_in_first_pipeline_stage": 1}
    with pytest.raises(ConfigError, match=f"{kwargs}.window_size cannot be set: tokens attend to their whole sample"):
        checked_layouts(VERIFY.load([*values, f"{kwargs}.window_size=1"]))


def test_a_model_that_cannot_be_had_is_not_called_inexact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(overrides(model="organisation/absent", tp=2)) == 2
    assert "neither a folder nor can it be downloaded" in capsys.readouterr().err


def test_the_model_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(overrides(model=tmp_path / "absent")) == 2
    assert "there is no such folder" in capsys.readouterr().err
