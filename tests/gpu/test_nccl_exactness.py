"""Gradients on GPUs over NCCL, in float32 and bfloat16, against Hugging Face's autograd in float32 on the CPU.

The models have two kinds of head sizes; in bfloat16 attention is FlashAttention, in float32 torch's own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Trial, run_layout
from skyrl_train.megatron.verify.outcome import BFLOAT16, FLOAT32, Outcome, compare
from tests.support.families import make_trial
from tests.support.layouts import WHOLE, layout, model

pytestmark = pytest.mark.timeout(300)
ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_tied", {}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
    "yarn": ("qwen3_yarn", {}),
}
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2": ("qwen3_tied", {"tp": 2, "sp": False}),
    "dense TP2 SP": ("qwen3_tied", {"tp": 2}),
    "dense PP2": ("qwen3_tied", {"pp": 2}),
    "dense PP2 VPP2": ("qwen3", {"pp": 2, "vpp": 2}),
    "dense DP2": ("qwen3_tied", {}),
    "dense CP2": ("qwen3_tied", {"cp": 2}),
    "experts EP2": ("qwen3_moe", {"ep": 2}),
    "experts TP2 ETP1": ("qwen3_moe", {"tp": 2, "etp": 1}),
    "experts PP2": ("qwen3_moe", {"pp": 2}),
    "latent attention EP2": ("deepseek_v3", {"ep": 2}),
    "latent attention TP2": ("deepseek_v3", {"tp": 2}),
    "latent attention CP2": ("deepseek_v3", {"cp": 2}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2 PP2": ("qwen3_tied", {"tp": 2, "pp": 2}),
    "dense DP2 PP2": ("qwen3_tied", {"pp": 2}),
    "dense CP2 TP2": ("qwen3_tied", {"cp": 2, "tp": 2}),
    "experts EP2 PP2": ("qwen3_moe", {"ep": 2, "pp": 2}),
    "experts EP2 ETP2": ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}),
    "latent attention EP2 PP2": ("deepseek_v3", {"ep": 2, "pp": 2}),
}


@functools.cache
def hugging_faces(name: str) -> tuple[Trial, Outcome]:
    trial = make_trial(model(name))
    return trial, hugging_face(trial)


@functools.cache
def one_process_in_half_precision(name: str) -> Outcome:
    return run_layout(replace(hugging_faces(name)[0], bf16=True), layout(1, {}, WHOLE, transformer_impl="torch"))


def check(name: str, processes: int, sizes: dict[str, Any], *, bf16: bool, impl: str = "torch") -> None:
    trial, hf = hugging_faces(name)
    outcome = run_layout(replace(trial, bf16=bf16), layout(processes, sizes, transformer_impl=impl))
    if bf16 and name != "qwen3_tied":
        # Rounding changes which experts some tokens choose, so only the same rounding can be compared with.
        difference = compare(outcome, one_process_in_half_precision(name))
    else:
        difference = compare(comparable(outcome, hf), hf)
    bounds = BFLOAT16 if bf16 else FLOAT32
    assert not bounds.exceeded(difference), "; ".join(bounds.exceeded(difference))
    print(f"gradient {difference.gradient:.1e}, worst {difference.worst_tensor[1]:.1e}")


def cases(table: dict[str, tuple[str, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(("name", "sizes"), table.values(), ids=table)


@pytest.mark.gpus(1)
@cases(ONE)
def test_one_gpu_has_hugging_faces_gradient_in_float32(name: str, sizes: dict[str, Any]):
    check(name, 1, sizes, bf16=False)


@pytest.mark.gpus(1)
def test_one_gpu_is_near_hugging_faces_gradient_in_bfloat16():
    check("qwen3_tied", 1, {}, bf16=True)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_transformer_engine_is_near_hugging_faces_gradient_in_bfloat16(name: str):
    pytest.importorskip("transformer_engine")
    check(name, 1, {}, bf16=True, impl="transformer_engine")


@pytest.mark.gpus(2)
@cases(TWO)
def test_two_gpus_have_hugging_faces_gradient_in_float32(name: str, sizes: dict[str, Any]):
    check(name, 2, sizes, bf16=False)


@pytest.mark.gpus(2)
@cases({name: TWO[name] for name in ("dense TP2 SP", "dense PP2", "dense DP2", "dense CP2", "experts EP2")})
def test_two_gpus_are_near_the_gradient_in_bfloat16(name: str, sizes: dict[str, Any]):
    check(name, 2, sizes, bf16=True)


@pytest.mark.gpus(4)
@cases(FOUR)
def test_four_gpus_have_hugging_faces_gradient_in_float32(name: str, sizes: dict[str, Any]):
    check(name, 4, sizes, bf16=False)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputing_activations_leaves_the_gradient_unchanged(granularity: str):
    trial, hf = hugging_faces("qwen3_tied")
    outcome = run_layout(trial, layout(1, {}, recompute_granularity=granularity, transformer_impl="torch"))
    assert not FLOAT32.exceeded(compare(comparable(outcome, hf), hf))
