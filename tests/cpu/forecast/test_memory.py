"""The forecast of a rank's memory is that which was measured on H200s, and its parameters are the model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from skyrl_train.config import load_config
from skyrl_train.config.policy import Layout, LoraConfig
from skyrl_train.engines.vllm.memory import ModelSize
from skyrl_train.forecast.activations import kept
from skyrl_train.forecast.engines import weight_bytes
from skyrl_train.forecast.layout import stages
from skyrl_train.forecast.memory import ModelOfRanks, Pass, in_flight, logit_bytes, update
from skyrl_train.forecast.parts import GIB, Part, PhaseMemory
from skyrl_train.forecast.shapes import model_config, shapes
from skyrl_train.hf.matrices import layers, num_parameters
from tests.support.families import FAMILIES, write_family
from tests.support.settings import engine_settings

MEASURED = json.loads((Path(__file__).parents[2] / "data/peak_memory.json").read_text())
"""Peaks of docs/readings/gpu_performance.md, before the head computed logits in pieces."""
BASE = load_config().trainer.policy.megatron_config
KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "recompute": "recompute_granularity",
    "layers": "transformer_impl",
}


def layout(gpus: int, **sizes: Any) -> Layout:
    named = {KEYS[name]: value for name, value in sizes.items() if name in KEYS}
    own = {"num_layers_in_first_pipeline_stage": 18} if sizes.get("even") else {}
    return Layout(replace(BASE, transformer_config_kwargs=own, **named), gpus)


def model(shape: str, laid: Layout, num_layers: int | None = None, lora: LoraConfig | None = None) -> ModelOfRanks:
    config = model_config(shape, num_layers)
    return ModelOfRanks(config, laid, 2, stages(config, laid, lora))


@pytest.mark.parametrize("measured", MEASURED, ids=lambda row: "-".join(map(str, row.values())))
def test_the_peak_of_an_update_is_the_measured_one(measured: dict[str, Any]):
    laid = layout(**measured)
    made, tokens = model(measured["shape"], laid), measured["tokens"]
    peaks = []
    for stage in made.stages:
        parts = update(made, stage, Pass(tokens, measured["micro_batches"]))
        peak = sum(part.likely for part in parts)
        if stage.has_head:  # then logits, their gradient and a stand-in for that of the head's weight at once
            head = made.config.hidden_size * made.config.vocab_size * 2 / laid.tp
            peak += 2 * logit_bytes(made, tokens / laid.cp) + head - parts[-1].likely
        peaks.append(peak / GIB)
    assert max(peaks) == pytest.approx(measured["gib"], rel=0.01)


@pytest.mark.parametrize(("recompute", "gib"), [(False, 102.6), (True, 101.2)])
def test_the_peak_with_logits_in_pieces_is_the_measured_one(recompute: bool, gib: float):
    """Measured after the forecast was written (docs/readings/gpu_performance.md)."""
    laid = layout(1, layers="torch")
    made = model("qwen3-4b", Layout(replace(laid.megatron, recompute_logits=recompute), 1))
    assert sum(part.likely for part in update(made, made.stages[0], Pass(8192, 8))) / GIB == pytest.approx(
        gib, rel=0.01
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_hugging_face(family: str, tmp_path: Path):
    config = transformers.AutoConfig.from_pretrained(write_family(family, tmp_path))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in built.parameters())
    assert num_parameters(config) == pytest.approx(count, rel=0.005)


def test_published_numbers_of_parameters():
    counts = {name: num_parameters(model_config(name)) / 1e9 for name in shapes()}
    assert counts["qwen3-0.6b"] == pytest.approx(0.596, abs=0.001)
    assert counts["qwen3-4b"] == pytest.approx(4.022, abs=0.001)
    assert counts["qwen3-8b"] == pytest.approx(8.191, abs=0.001)
    assert counts["qwen3-30b-a3b"] == pytest.approx(30.532, abs=0.001)


def test_fp8_weights_of_engines_are_those_of_vllm():
    """Qwen3-8B: embedding and output layer of 622 million weights each, and 6946 million in the layers' matrices."""
    config = model_config("qwen3-8b")
    matrices, rows = 6_945_767_424, 36 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)
    assert weight_bytes(config, 2, None) == 2 * num_parameters(config)
    assert weight_bytes(config, 2, "fp8") == 2 * num_parameters(config) - matrices + 4 * rows


def test_the_fp8_weights_of_a_checkpoint_are_those_of_its_configuration(tmp_path: Path):
    for kind in ("qwen3_tied", "qwen3_moe", "deepseek_v3"):
        folder = write_family(kind, tmp_path / kind)
        settings = engine_settings(str(folder), "m", "bfloat16", 128, quantization="fp8")
        config = transformers.AutoConfig.from_pretrained(folder)
        assert ModelSize.of(settings).weights_bytes == pytest.approx(weight_bytes(config, 2, "fp8"), rel=1e-3)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 4}, {"tp": 2, "pp": 2, "ep": 4}, {"pp": 2, "vpp": 2}], ids=str)
def test_ranks_of_one_copy_hold_the_model_together(sizes: dict[str, int]):
    laid = layout(16, **sizes)
    made = model("qwen3-30b-a3b", laid)
    dense = sum(stage.parameters.dense for stage in made.stages) * laid.tp
    experts = sum(stage.parameters.experts for stage in made.stages) * laid.ep * laid.etp
    # Norms and routers are on every tensor rank.
    assert dense + experts == pytest.approx(num_parameters(made.config), rel=0.002)


def test_an_adapter_has_few_gradients_and_the_frozen_weights_none():
    lora = replace(load_config().trainer.policy.model.lora, rank=16)
    made = model("qwen3-4b", layout(1), lora=lora)
    parts = {part.name: part.likely for part in update(made, made.stages[0], Pass(8192, 4))}
    rank, num_layers = 16, 36
    sides = [(2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560), (2560, 9728), (2560, 9728), (9728, 2560)]
    adapters = num_layers * rank * sum(inputs + outputs for inputs, outputs in sides)
    assert parts["gradients"] == 4 * adapters and parts["optimizer"] == 12 * adapters


def test_every_tensor_rank_has_the_factor_of_an_adapter_that_is_not_sharded():
    lora = replace(load_config().trainer.policy.model.lora, rank=32)
    (stage,) = model("qwen3-30b-a3b", layout(4, tp=4), lora=lora).stages
    of_experts = 48 * 128 * 32 * (3 * 2048 + 3 * 768 // 4)  # gate and up share B's rows, down A's columns
    column = (2048 + 4096 // 4) + 2 * (2048 + 512 // 4)  # queries, keys and values
    assert stage.trained.experts == of_experts
    assert stage.trained.dense == 48 * 32 * (column + 4096 // 4 + 2048)


def test_micro_batches_in_flight_are_those_of_the_schedule():
    many = Pass(1, 16)
    assert [in_flight(rank, layout(4, pp=4), many) for rank in range(4)] == [[4], [3], [2], [1]]
    assert in_flight(0, layout(4, pp=4), Pass(1, 2)) == [2]
    # Megatron's interleaved schedule: 2 (P - 1) + (V - 1) P forward passes before the first backward, and that one.
    assert sum(in_flight(0, layout(4, pp=4, vpp=2), many)) == 2 * 3 + 4 + 1


def test_cheap_recomputation_saves_what_the_documentation_says():
    """29.7 kB per token and layer of Qwen3-4B: two norms and an activation (docs/performance.md)."""
    config, plain = model_config("qwen3-4b"), layout(1, layers="torch")
    modules = ("layernorm", "mlp_act")
    cheap = replace(plain.megatron, recompute_granularity="selective", recompute_modules=modules)
    layer = layers(config)[0]
    saved = kept(config, layer, plain, 2).layer - kept(config, layer, Layout(cheap, 1), 2).layer
    assert saved == 2 * (2 * 2560 + 9728)


def test_the_first_layers_of_a_stage_are_recomputed_and_the_others_keep_all():
    """Of 36 layers 12, which keep their inputs."""
    config, plain = model_config("qwen3-4b"), layout(1, layers="torch")
    whole = kept(config, layers(config)[0], plain, 2).layer

    def activations(**changes: Any) -> float:
        laid = Layout(replace(plain.megatron, **changes), 1)
        parts = update(made := model("qwen3-4b", laid), made.stages[0], Pass(1_000, 1))
        return next(part.likely for part in parts if part.name == "activations") - 2 * 2560 * 2 * 1_000

    assert activations() == pytest.approx(36 * whole * 1_000)
    some = activations(recompute_granularity="full", recompute_num_layers=12)
    assert some == pytest.approx((24 * whole + 12 * 2560 * 2) * 1_000)
    for num in (36, 99, None):
        assert activations(recompute_granularity="full", recompute_num_layers=num) == 36 * 2560 * 2 * 1_000


def test_parts_that_take_what_is_free_do_not_decide_whether_a_phase_fits():
    phase = PhaseMemory("x", "all", (Part("fixed", 50, 0.1), Part("cache", 100, 0.0, least=10)))
    assert (phase.low, phase.high) == (55 - 10 + 10, 65)
    assert phase.within(80).likely == 80 and phase.within(20).likely == 60
