"""Adapters on Megatron have the gradient that PEFT's have on Hugging Face's model, under every layout."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.policy import LoraConfig
from skyrl_train.megatron.lora import adapters as lora
from skyrl_train.megatron.lora import attach as lora_attach
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Trial, run_layout
from skyrl_train.megatron.verify.outcome import Outcome, compare
from tests.support.adapters import Adapted, peft_gradients, peft_model, write_adapter
from tests.support.families import COMBINED, MOE, make_trial
from tests.support.layouts import EXPERT, FOUR, assert_exact, cases, layout, model

DENSE = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2, "sp": False}),
    "TP2 SP": (2, {"tp": 2}),
    "TP4 SP, more ranks than keys": (4, {"tp": 4}),
    "PP2": (2, {"pp": 2}),
    "PP2 VPP2": (2, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "CP2": (2, {"cp": 2}),
}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def adapted(family: str, **changes: Any) -> LoraConfig:
    return write_adapter(Path(_folder().name, f"{family} {changes}"), model(family), **changes)


@functools.cache
def with_adapter(family: str, **changes: Any) -> tuple[Trial, Outcome]:
    """(trial, autograd through Hugging Face's model)"""
    config = adapted(family, **changes)
    trial = replace(make_trial(model(family)), lora=config)
    reference = Adapted(model(family), config)
    return trial, hugging_face(trial, model=reference, gradients_of=Adapted.gradients)


def check(family: str, one: Any, **changes: Any) -> None:
    trial, hf = with_adapter(family, **changes)
    assert_exact(compare(comparable(run_layout(trial, one), hf), hf))


def test_peft_computes_the_gradient_that_layouts_are_compared_with():
    trial, hf = with_adapter("qwen3_tied")
    assert trial.lora is not None and trial.lora.path is not None
    theirs = peft_model(trial.model_path, trial.lora.path)
    assert_exact(compare(hugging_face(trial, model=theirs, gradients_of=peft_gradients), hf))


@cases(DENSE)
def test_adapters_of_a_dense_model_have_pefts_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_tied", layout(processes, sizes))


@cases(EXPERT | {"ETP2": (2, {"etp": 2}), "EP2 ETP2": (4, {"tp": 2, "ep": 2, "etp": 2})})
def test_adapters_of_experts_have_pefts_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_moe", layout(processes, sizes))


@pytest.mark.slow
def test_adapters_of_latent_attention_and_shared_experts_have_pefts_gradient():
    """The routed experts of qwen3_moe have this layout above."""
    check("deepseek_v3", layout(4, {"tp": 2, "ep": 2, "etp": 2}))


def test_some_modules_of_a_fused_layer_may_be_adapted_alone():
    check("qwen3_tied", layout(2, {"tp": 2}), target_modules=("q_proj", "v_proj", "up_proj"))


@pytest.mark.parametrize(("granularity", "num_layers"), [("full", None), ("full", 1), ("selective", None)])
def test_recomputing_activations_leaves_the_gradient_of_adapters_unchanged(granularity: str, num_layers: int | None):
    changes = {"recompute_modules": ("moe",), "recompute_num_layers": num_layers}
    check("qwen3_moe", layout(2, {"pp": 2}, recompute_granularity=granularity, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMBINED if name not in MOE])
@cases({name: FOUR[name] for name in ("TP2 PP2", "CP2 TP2")})
def test_adapters_of_dense_families_have_pefts_gradient(name: str, processes: int, sizes: dict[str, Any]):
    check(name, layout(processes, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_adapters_of_every_family_of_experts_have_pefts_gradient(name: str):
    check(name, layout(4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}))


def forget_the_sum_over_the_sequence(patch: pytest.MonkeyPatch) -> None:
    """A's gradient is each rank's own tokens' only."""
    tell = lora.Adapter._mark_for_megatron

    def wrong(self: Any, weight: Any) -> None:
        tell(self, weight)
        self.lora_A.sequence_parallel = False

    patch.setattr(lora.Adapter, "_mark_for_megatron", wrong)


def forget_the_sum_over_the_tensor_group(patch: pytest.MonkeyPatch) -> None:
    """Without sequence parallelism the gradient that reaches A is of this rank's rows of B only."""
    patch.setattr(lora.mappings, "copy_to_tensor_model_parallel_region", lambda hidden: hidden)


def forget_the_sum_over_expert_tensor_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lora.Lora, "reduce_gradients", lambda self: None)


def reduce_experts_with_the_dense_group(patch: pytest.MonkeyPatch) -> None:
    tell = lora.Adapter._mark_for_megatron

    def wrong(self: Any, weight: Any) -> None:
        tell(self, weight)
        for parameter in self.parameters():
            parameter.allreduce = True

    patch.setattr(lora.Adapter, "_mark_for_megatron", wrong)


def stack_queries_keys_and_values(patch: pytest.MonkeyPatch) -> None:
    """Rows of B as Hugging Face would stack them, not interleaved by groups of heads."""
    parts = lora_attach._part_of_row
    patch.setattr(lora_attach, "_part_of_row", lambda *args: parts(*args).sort().values)


def leave_the_norm_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lora, "rms_norm", lambda x, *rest: x)


def count_a_whole_tensor_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    tell = lora.Adapter._mark_for_megatron

    def wrong(self: Any, weight: Any) -> None:
        tell(self, weight)
        self.lora_A.tensor_model_parallel = True

    patch.setattr(lora.Adapter, "_mark_for_megatron", wrong)


def let_checkpointing_start_without_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """The embedding is frozen, so nothing that enters the first recomputed layer asks for a gradient."""
    patch.setattr(lora_attach, "_require_gradient", lambda *args: None)


TP2, TP2_SP = layout(2, {"tp": 2, "sp": False}), layout(2, {"tp": 2})
BUGS = [
    (forget_the_sum_over_the_sequence, "qwen3_tied", TP2_SP, "gradient is off"),
    (forget_the_sum_over_the_tensor_group, "qwen3_tied", TP2, "gradient is off"),
    (forget_the_sum_over_expert_tensor_ranks, "qwen3_moe", TP2_SP, "gradient is off"),
    (reduce_experts_with_the_dense_group, "qwen3_moe", layout(2, {"tp": 2, "etp": 1}), "gradient is off"),
    (stack_queries_keys_and_values, "qwen3_tied", TP2_SP, "gradient is off"),
    (let_checkpointing_start_without_a_gradient, "qwen3_tied", layout(1, {}, recompute_granularity="full"), ""),
    (leave_the_norm_out, "qwen3_tied", layout(1, {}), "gradient is off"),
    (count_a_whole_tensor_on_every_rank, "qwen3_tied", TP2_SP, "grad_norm is off"),
]


@pytest.mark.parametrize(("plant", "family", "one", "says"), BUGS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_planted_bug_is_found(plant: Any, family: str, one: Any, says: str, monkeypatch: pytest.MonkeyPatch):
    with_adapter(family)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=says):
        check(family, one)
