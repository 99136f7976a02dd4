"""The forecast on the command line and before a run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from rich.console import Console

from skyrl_train.checks.rl import check
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import ConfigError, load_config
from skyrl_train.device.kinds import DeviceKind, device_kind
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.plan import main
from skyrl_train.forecast.fit import fitted, fitted_for_evaluation
from skyrl_train.forecast.shapes import model_config
from tests.support.local_hub import COMMIT

TEACHER = "trainer.policy.model.path=a trainer.teacher.model.path=a trainer.teacher.backend=engine"
SERVED = f"{TEACHER} trainer.algorithm.distillation.distillation_type=advantage"


def test_the_command_prints_memory_times_and_proposals(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "plan.json"
    assert main(["plan.shape=qwen3-0.6b", "plan.device=h200", f"plan.json_file={file}"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "0.60 billion parameters",
        "KV cache",
        "optimizer",
        "weight sync",
        "overrides, fastest first:\n1: nothing to add: a run chooses open keys as above\n",
        "max_num_seqs=512, because",
    ):
        assert expected in printed
    made = json.loads(file.read_text())
    assert made["choices"]["trainer.max_tokens_per_microbatch"] == 32_768
    assert made["fits"] and made["proposals"][0]["overrides"] == []
    copied = [" ".join(each["overrides"]) for each in made["proposals"][1:5]]
    assert all(f": {line}\n" in printed for line in copied), "a line each, also in 80 columns"
    assert {phase["phase"] for phase in made["phases"]} == {"generation", "update", "reference"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("plan.device=h300", "plan.device is h300: an unknown kind of GPU"),
        ("plan.shape=qwen9", "plan.shape is qwen9: there is no such shape"),
        ("plan.shape=null plan.num_layers=4", "plan.num_layers is 4 and plan.shape is null"),
        ("trainer.policy.megatron_config.tensor_model_parallel_size=2", "not a multiple of"),
        ("trainer.policy.megatron_config.expert_model_parallel_size=2", "the model has no experts"),
        ("trainer.train_batch_size=100", "not a multiple of trainer.policy_mini_batch_size"),
        ("trainer.ref.megatron_config.tensor_model_parallel_size=2", "not a multiple of trainer.ref.megatron_config"),
        ("generator.inference_engine_tensor_parallel_size=3", "must divide the model's 16 attention heads"),
        ("generator.sampling_params.max_generate_length=200000", "more than the model's 40960 positions"),
        (
            f"{SERVED} generator.sampling_params.max_generate_length=40448",
            "samples of fewer than the model's 40960",
        ),
    ],
)
def test_what_cannot_be_forecast_is_an_error(override: str, expected: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan.device=h200", "plan.shape=qwen3-0.6b", *override.split()]) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.use_kl_in_reward=true"],
        ["generator.sampling_params.top_p=0.9"],
        ["trainer.policy.model.lora.target_modules=[q_proj]"],
        ["environment.reward_fn=[nowhere:reward]"],
        ["trainer.resume_mode=from_path"],
        ["generator.weight_sync_backend=cuda_ipc", "trainer.train_batch_size=100"],
    ],
)
def test_a_configuration_that_a_run_would_refuse_is_refused_with_its_message(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ConfigError) as refused:
        check(load_config(overrides), None, files=False)
    assert main(["plan.device=h200", "plan.shape=qwen3-0.6b", *overrides]) == 2
    assert str(refused.value) in capsys.readouterr().err


def test_packages_that_this_machine_lacks_do_not_prevent_a_forecast(monkeypatch: pytest.MonkeyPatch):
    layers = "trainer.policy.megatron_config.transformer_impl=transformer_engine"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="transformer_engine, which is not installed"):
        check(load_config([layers]), None, files=False)
    assert main(["plan.device=h200", "plan.shape=qwen3-0.6b", "plan.propose=false", layers]) == 0


def kind_of(name: str) -> DeviceKind:
    kind = device_kind(name)
    assert kind is not None
    return kind


def test_other_models_are_downloaded_before_the_forecast_reads_their_sizes(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []

    class Recorded(Experiment):
        def load_model(self) -> Any:
            return "folder", transformers.PretrainedConfig(vocab_size=1)

        def get_tokenizer(self) -> Any:
            return SimpleNamespace(get_vocab=lambda: {"a": 0})

        def check_models(self) -> None:
            called.append("download")

        def fit_to_device(self, kind: DeviceKind) -> None:
            called.append("forecast")
            raise ValueError("does not fit")

    monkeypatch.setattr("skyrl_train.entrypoints.run.local_gpu_kind", lambda: kind_of("NVIDIA H200"))
    with pytest.raises(ValueError, match="does not fit"):
        Recorded(load_config(), Console())
    assert called == ["download", "forecast"]


def test_a_run_on_gpus_prints_the_forecast_and_refuses_what_cannot_fit():
    config, said = load_config(["trainer.policy.model.path=qwen3"]), list[str]()
    made = fitted(config, model_config("qwen3-0.6b"), kind_of("NVIDIA H200"), said.append)
    choices, summary = said
    assert "GiB of 139.8 by the forecast (one process)" in summary
    assert choices.startswith("chose   for H200: enforce_eager=false, because")
    assert made.trainer.max_tokens_per_microbatch == 32_768 and made.generator.max_num_batched_tokens == 16_384
    with pytest.raises(ValueError, match=r"update needs at least .* This fits: trainer\.placement\.policy_num_gpus"):
        fitted(config, model_config("qwen3-8b"), kind_of("NVIDIA H100 80GB HBM3"), said.append)


def test_a_driver_without_a_gpu_fits_the_run_to_the_gpus_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def kind() -> DeviceKind:
        return kind_of("NVIDIA H200")

    monkeypatch.setattr("skyrl_train.entrypoints.run.cluster_gpu_kind", kind)
    run = Experiment.__new__(Experiment)
    run.config, run.model_config = load_config(["trainer.policy.model.path=qwen3"]), model_config("qwen3-0.6b")
    run._console, run._local_kind = Console(), kind_of("NVIDIA H200")
    asyncio.run(run.fit_to_cluster(Cluster("127.0.0.1:6379", is_local=True, has_gpus=True)))
    assert not capsys.readouterr().out, "it was fitted before Ray started"
    run._local_kind = None
    asyncio.run(run.fit_to_cluster(Cluster("head:6379", is_local=False, has_gpus=False)))
    assert run.config.trainer.max_tokens_per_microbatch is None and not capsys.readouterr().out
    asyncio.run(run.fit_to_cluster(Cluster("head:6379", is_local=False, has_gpus=True)))
    assert run.config.trainer.max_tokens_per_microbatch == 32_768
    assert "chose   for H200: enforce_eager=false" in capsys.readouterr().out


def test_an_evaluation_chooses_the_keys_of_its_engines_and_refuses_nothing():
    samples = ["trainer.eval_batch_size=100", "generator.eval_n_samples_per_prompt=8"]
    given = ["trainer.policy.model.path=qwen3", "generator.num_inference_engines=2", *samples]
    config, said = load_config(given), list[str]()
    made = fitted_for_evaluation(config, model_config("qwen3-30b-a3b"), kind_of("NVIDIA H100"), said.append)
    assert made.generator.max_num_seqs == 408 and not made.generator.enforce_eager  # 800 / 2, and one prompt's 8 more
    assert made.trainer == config.trainer
    served = replace(config, generator=replace(config.generator, run_engines_locally=False))
    assert fitted_for_evaluation(served, model_config("qwen3-0.6b"), kind_of("NVIDIA H100"), said.append) == served
    assert len(said) == 1 and "max_num_seqs=408, because an engine may get 408 samples at once" in said[0]


@pytest.mark.parametrize("override", ["utilization=0.02", "utilization=1.0 trainer.placement.colocate_all=true"])
def test_only_an_engine_that_does_not_fit_is_said_to_be(override: str, capsys: pytest.CaptureFixture[str]):
    overrides = f"plan.shape=qwen3-0.6b plan.device=h100 generator.gpu_memory_{override}".split()
    assert main(overrides) == 1
    assert "An engine may not fit. The trainers' layout does not change that." in capsys.readouterr().out


def test_a_model_that_a_run_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    for kind, sizes in (("Gemma3Text", {}), ("Qwen3", sliding)):
        getattr(transformers, f"{kind}Config")(**sizes).save_pretrained(tmp_path / kind)
        assert main([f"trainer.policy.model.path={tmp_path / kind}", "plan.device=h100"]) == 2
        assert "trainer.policy.model.path is" in capsys.readouterr().err
        reference = ["plan.shape=qwen3-0.6b", f"trainer.ref.model.path={tmp_path / kind}"]
        assert main([*reference, "plan.device=h100"]) == 2
        assert "trainer.ref.model.path is" in capsys.readouterr().err
    assert main(["trainer.policy.model.path=./none", "plan.device=h100"]) == 2
    assert "trainer.policy.model.path is ./none: there is no such folder" in capsys.readouterr().err


def test_a_hub_model_needs_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("policy", "reference"):
        cached = tmp_path / f"models--org--{name}"
        model_config("qwen3-0.6b").save_pretrained(cached / "snapshots" / COMMIT)
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text(COMMIT)
    models = [f"trainer.policy.model.path=org/policy@{COMMIT}", "trainer.ref.model.path=org/reference"]
    assert main([*models, "plan.device=h200", "plan.propose=false"]) == 0
    for path in ("org/policy@other", "org/none"):
        assert main([f"trainer.policy.model.path={path}", "plan.device=h200"]) == 2
        assert f"trainer.policy.model.path is {path}: it is neither a folder nor can" in capsys.readouterr().err
