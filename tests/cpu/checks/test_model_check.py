"""The configuration made small, through Hugging Face and through Megatron."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from skyrl_train.checks import equivalence
from skyrl_train.hf.shrink import shrunk
from skyrl_train.megatron.model import bridge, families
from skyrl_train.megatron.verify import model_check
from tests.support import released
from tests.support.families import FAMILIES, SHAPE, YARN

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "a padding token": ("qwen3_tied", {"pad_token_id": 3}),
    "a padding token counted from the end": ("llama3_rope", {"pad_token_id": -1}),
    "quarter rotary": ("glm4_moe", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "whole rotary": ("glm4_moe", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "partial rotary under YaRN": ("glm4_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "linear rope": ("qwen2", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}}),
    "YaRN's attention factor": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 0.7}}),
    "YaRN without rounding": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"truncate": False}}),
    "latent YaRN, other betas": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "latent YaRN without mscale": ("deepseek_v3", {"rope_parameters": YARN}),
    "one expert of a token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "all experts of a token": ("qwen3_moe", {"num_experts_per_tok": 4}),
    "groups of experts": (
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "no bias of queries": ("qwen2_moe", {"qkv_bias": False}),
    "no norm of queries": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    "one key-value head": ("llama3_rope", {"num_key_value_heads": 1}),
    "a wide eps": ("qwen3_moe", {"rms_norm_eps": 0.1}),
    "a wide eps of latent attention": ("deepseek_v3", {"rms_norm_eps": 0.1}),
}


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    kind, own = FAMILIES[name]
    return getattr(transformers, f"{kind}Config")(**{**SHAPE, **own, **changes})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_every_variant_that_is_built_is_hugging_faces(name: str, changes: dict[str, Any]):
    verdict = model_check.check_model(config_of(name, **changes))
    assert verdict.problems == [] and verdict.gradient < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", released.ONE_PER_FAMILY)
def test_a_released_model_is_computed_as_hugging_face_computes_it(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(released.CONFIGS[name]))
    assert model_check.check_model(transformers.AutoConfig.from_pretrained(tmp_path)).problems == []


def no_partial_rotary(patch: pytest.MonkeyPatch) -> None:
    load = bridge.load_hf_config

    def half(path: str) -> Any:
        config = load(path)
        config.partial_rotary_factor = 0.5
        return config

    patch.setattr(bridge, "load_hf_config", half)


def normalised_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridge, "corrections", lambda hf_config: {"moe_router_pre_softmax": hf_config.norm_topk_prob})


@pytest.mark.parametrize(
    ("wrong", "name", "changes"),
    [
        (no_partial_rotary, "glm4_moe", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
        (normalised_weights, "qwen3_moe", {"norm_topk_prob": False}),
        (lambda patch: patch.setattr(bridge, "LATENT_NORM_EPS", 0.1), "deepseek_v3", {}),
        (lambda patch: patch.setattr(bridge, "_correct_rope", lambda *_: None), "llama3_rope", {}),
        (
            lambda patch: patch.setattr(bridge, "_leave_padding_untrained", lambda *_: None),
            "qwen3",
            {"pad_token_id": 3},
        ),
        # Past the ledger, which refuses them.
        (lambda patch: None, "qwen3_moe", {"use_sliding_window": True, "sliding_window": 4096}),
        (
            lambda patch: None,
            "llama3_rope",
            {
                "rope_parameters": ROPE
                | {
                    "rope_type": "longrope",
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 4096,
                }
            },
        ),
        (
            lambda patch: None,
            "qwen3",
            {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
        ),
    ],
    ids=["partial rotary", "router weights", "latent eps", "rope scaling", "padding", "window", "longrope", "dynamic"],
)
def test_a_field_that_is_wired_wrongly_is_caught(
    wrong: Any, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(families, "config_problems", lambda *_: [])
    wrong(monkeypatch)
    verdict = model_check.check_model(config_of(name, **changes))
    assert verdict.problems and verdict.gradient > 1e-3


def test_what_rotary_embeddings_depend_on_does_not_shrink():
    config = config_of(
        "deepseek_v3", qk_rope_head_dim=64, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    )
    small = shrunk(config)
    assert (small.qk_rope_head_dim, small.rope_parameters) == (64, config.rope_parameters)
    assert small.max_position_embeddings == config.max_position_embeddings


def test_structure_does_not_shrink():
    released = transformers.DeepseekV3Config(num_experts_per_tok=8, n_group=8, topk_group=4)
    small = shrunk(released)
    assert (small.n_group, small.topk_group, small.num_experts_per_tok) == (8, 4, 8)
    assert small.n_routed_experts % small.n_group == 0
    assert (small.num_hidden_layers, small.first_k_dense_replace) == (4, 2)
    grouped = shrunk(transformers.Qwen3Config(num_attention_heads=40, num_key_value_heads=8))
    assert (grouped.num_attention_heads, grouped.num_key_value_heads, grouped.head_dim) == (4, 2, 128)


def test_mixed_kinds_of_layers_stay_in_their_order():
    kinds = ["dense"] + ["sparse"] * 5
    config = config_of("glm4_moe_lite", num_hidden_layers=6, mlp_layer_types=kinds)
    assert shrunk(config).mlp_layer_types == ["dense", "sparse", "sparse"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compared(folder: Path) -> PretrainedConfig:
    config = equivalence.known_config(str(folder), "model")
    equivalence.compare_with_hugging_face(config, str(folder), "model")
    return config


@pytest.mark.slow
def test_a_configuration_is_compared_once_and_needs_neither_weights_nor_libraries_of_gpus(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("transformer_engine", "apex"):  # as on a machine where they are installed
        (tmp_path / "gpu" / name).mkdir(parents=True)
        (tmp_path / "gpu" / name / "__init__.py").write_text("raise RuntimeError('no CUDA-capable device is detected')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "gpu"), prepend=":")
    folder = tmp_path / "model"
    config_of("qwen3_tied").save_pretrained(folder)
    assert compared(folder).model_type == "qwen3"
    (noted,) = cache.rglob("*.json")
    assert json.loads(noted.read_text())["gradient"] < 5e-6

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compared again"))
    compared(folder)
    other = tmp_path / "elsewhere"
    config_of("qwen3_tied", hidden_size=128, num_hidden_layers=8).save_pretrained(other)
    compared(other)  # as small as the first


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (
            subprocess.CompletedProcess([], 0, stdout='noise\n{"problems": ["the gradient is off"]}\n', stderr=""),
            "with random weights the gradient is off",
        ),
        (
            subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback ...\nValueError: no such layer\n"),
            "it cannot be built: ValueError: no such layer",
        ),
        (
            subprocess.CompletedProcess(
                [], 1, stdout="", stderr="Traceback ...\ntorch.AcceleratorError: none\nFor debugging ...\n"
            ),
            "it cannot be built: torch.AcceleratorError: none",
        ),
    ],
)
def test_a_model_that_differs_or_cannot_be_built_is_refused_and_not_cached(
    done: Any, says: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    config_of("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ValueError, match=f"model is .*would not be computed as Hugging Face computes it: {says}"):
        compared(tmp_path)
    assert not list(cache.rglob("*.json"))


def test_a_change_of_the_code_or_the_libraries_is_compared_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of("qwen3")
    first = equivalence._cache_file(config)
    monkeypatch.setattr(equivalence, "PACKAGES", (*equivalence.PACKAGES, "numpy"))
    assert equivalence._cache_file(config) != first
    assert first != equivalence._cache_file(config_of("qwen3", rms_norm_eps=1e-5))
