"""Models that engines could not load or serve are refused before anything starts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from skyrl_train.checks.engines import check_vllm
from skyrl_train.cluster.session import known_device_type
from skyrl_train.config import Config, load_config
from skyrl_train.engines.vllm.models import model_problems
from tests.support import released
from tests.support.families import FAMILIES, SHAPE
from tests.support.sync_proof import KINDS

CACHE = "generator.kv_cache_memory_gb=0.25"
ADAPTER = ["trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.sync=adapter"]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("skyrl_train.cluster.session.device_type", lambda: "cpu")


def model_of(kind: str, folder: Path, *removed: str, **changes: Any) -> transformers.PretrainedConfig:
    """A model of the sync proofs, as its config.json is read."""
    family, own = KINDS[kind]
    name, shape = FAMILIES[family]
    getattr(transformers, f"{name}Config")(**{**SHAPE, **shape, **own, **changes}).save_pretrained(folder)
    file = folder / "config.json"
    given = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in given.items() if key not in removed}))
    return transformers.AutoConfig.from_pretrained(folder)


def problem(model: transformers.PretrainedConfig, *overrides: str) -> str:
    """What is refused; "" if nothing is."""
    try:
        check_vllm(config(*overrides), model, known_device_type())
    except ValueError as error:
        return str(error)
    return ""


@cache
def config(*overrides: str) -> Config:
    return load_config(["trainer.policy.model.path=model", CACHE, *overrides])


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_of_the_sync_proofs_is_accepted(kind: str, tmp_path: Path):
    assert problem(model_of(kind, tmp_path)) == ""


def test_adapters_of_experts_need_merging_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    experts = model_of("experts", tmp_path)
    assert problem(experts, *ADAPTER) == (
        "trainer.policy.model.path is model and has experts, and trainer.policy.model.lora.sync is adapter: without a "
        "GPU, vLLM serves no adapters of such models. Set trainer.policy.model.lora.sync=merged"
    )
    assert problem(experts, ADAPTER[0]) == problem(experts, ADAPTER[1]) == ""
    assert problem(model_of("dense tied", tmp_path), *ADAPTER) == ""
    monkeypatch.setattr("skyrl_train.cluster.session.device_type", lambda: "cuda")
    assert problem(experts, *ADAPTER) == ""


TWO_RANKS = ["generator.inference_engine_tensor_parallel_size=2"]
FOUR_RANKS = ["generator.inference_engine_tensor_parallel_size=4"]
FP8 = ["generator.quantization=fp8", "generator.model_dtype=bfloat16"]


def test_experts_are_quantised_on_gpus_alone_and_without_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dense, experts = model_of("dense tied", tmp_path / "dense"), model_of("experts", tmp_path / "experts")
    assert problem(dense, *FP8) == problem(dense, *FP8, *ADAPTER) == problem(experts) == ""
    assert problem(experts, *FP8) == (
        "generator.quantization is fp8, and trainer.policy.model.path is model and has experts: without a GPU, vLLM "
        "has no FP8 kernel for them. Set generator.quantization=null, or use engines on GPUs"
    )
    monkeypatch.setattr("skyrl_train.cluster.session.device_type", lambda: "cuda")
    assert problem(experts, *FP8) == problem(experts, *FP8, ADAPTER[0]) == ""
    assert "not every FP8 kernel of vLLM for experts takes adapters" in problem(experts, *FP8, *ADAPTER)


@pytest.mark.parametrize(
    ("kind", "changes", "overrides", "layer"),
    [
        ("dense tied", {"intermediate_size": 72}, [], None),  # gate and up projection are one layer of 144 outputs
        ("dense tied", {"intermediate_size": 36}, [], "mlp.gate_up_proj has 72 outputs"),
        ("dense tied", {"intermediate_size": 72}, TWO_RANKS, "mlp.gate_up_proj has 72 outputs"),
        ("dense tied", {"hidden_size": 72}, [], "self_attn.o_proj has 72 outputs"),
        ("dense tied", {"head_dim": 38}, [], None),
        ("dense tied", {"head_dim": 38}, TWO_RANKS, "self_attn.qkv_proj has 152 outputs"),
        ("dense tied", {"head_dim": 24}, FOUR_RANKS, "self_attn.qkv_proj has 72 outputs"),  # two heads of keys
        ("experts", {"moe_intermediate_size": 36}, [], None),  # another kernel
        ("latent attention", {"q_lora_rank": 32}, [], None),
        ("latent attention", {"q_lora_rank": 24}, [], "self_attn.fused_qkv_a_proj has 600 outputs"),
    ],
)
def test_layers_that_vllm_cannot_start_in_fp8_on_gpus_are_named(
    kind: str,
    changes: dict[str, Any],
    overrides: list[str],
    layer: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    model = model_of(kind, tmp_path, **changes)
    monkeypatch.setattr("skyrl_train.cluster.session.device_type", lambda: "cuda")
    said = problem(model, *FP8, *overrides)
    assert said == "" if layer is None else f"{layer} on each rank of an engine" in said and "multiple of 16" in said
    assert problem(model, *overrides) == ""


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(tmp_path: Path):
    model = model_of("dense tied", tmp_path, quantization_config={"quant_method": "fp8"})
    assert "its checkpoint is quantised already" in problem(model, *FP8)
    assert problem(model) == ""


@pytest.mark.parametrize(
    ("kind", "field", "says"),
    [
        ("latent attention", "topk_method", "the routers' e_score_correction_bias is not loaded). Add it, often as \""),
        ("GLM latent attention", "first_k_dense_replace", "mlp_layer_types instead). Add it, often as 1"),
    ],
)
def test_a_field_that_only_vllm_reads_must_be_there(
    kind: str, field: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(kind, tmp_path, field)
    for address in (None, "ray://head:10001"):  # whatever the engines run on
        monkeypatch.setenv("RAY_ADDRESS", address) if address else None
        said = problem(model)
        assert f"trainer.policy.model.path is model: its config.json has no {field}, which vLLM reads" in said
        assert says in said
    assert problem(model, "generator.backend=own_engine:ENGINE") == ""


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "dense tied",
            {"head_dim": 48},
            "its attention heads have size 48, and without a GPU vLLM computes the sizes 32,",
        ),
        ("dense untied", {"num_attention_heads": 8}, "its attention heads have size 16"),
        (
            "latent attention",
            {"kv_lora_rank": 256},
            "its kv_lora_rank 256 + qk_rope_head_dim 64 is 320, and without a GPU vLLM computes latent attention",
        ),
    ],
)
def test_sizes_of_heads_are_those_of_vllms_kernels_without_a_gpu(
    kind: str, changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(kind, tmp_path, **changes)
    assert f"trainer.policy.model.path is model: {says}" in problem(model)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert problem(model) == ""


@pytest.mark.parametrize("name", sorted(released.CONFIGS.keys() - released.REFUSED.keys()))
def test_released_models_that_can_be_trained_have_what_vllm_reads(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(released.CONFIGS[name]))
    assert problem(transformers.AutoConfig.from_pretrained(tmp_path)) == ""


def test_a_process_of_ray_does_not_take_its_hidden_gpus_for_the_engines(monkeypatch: pytest.MonkeyPatch):
    assert known_device_type() == "cpu"
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    assert known_device_type() is None


def test_only_families_that_are_trained_are_judged_by_their_heads():
    """MiniCPM3 has a latent, and vLLM computes its attention without one."""
    other = SimpleNamespace(model_type="minicpm3", kv_lora_rank=256, qk_rope_head_dim=32)
    assert not list(model_problems(other, "minicpm3", "cpu", None))  # type: ignore[arg-type]
