"""The gradient of a mini-batch, and everything logged about it, does not depend on how it was split.

Every layout runs real Megatron-core in as many processes over gloo and is compared with Hugging Face's own model in one
process, and its metrics with those of one Megatron process with one micro-batch.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, MOE, hugging_face, lengths, make_trial, write_family

from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.config import MegatronConfig, load_config
from skyrl_train.megatron.layout_check import Difference, Layout, Outcome, Trial, compare, run_layout

GRADIENT, WORST_TENSOR, LOGPROBS, METRICS = 5e-6, 2e-5, 5e-6, 1e-6
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
}
# name -> (processes, sizes)
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2, "sp": False}),
    "TP2 SP": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "PP2 VPP2": (2, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "CP2": (2, {"cp": 2}),
}
FOUR: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2 PP2": (4, {"tp": 2, "pp": 2}),
    "DP2 PP2": (4, {"pp": 2}),
    "TP2 DP2": (4, {"tp": 2}),
    "CP2 TP2": (4, {"cp": 2, "tp": 2}),
    "PP4": (4, {"pp": 4}),
}
EXPERT: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2}),
    "EP2": (2, {"ep": 2}),
    "TP2 ETP1": (2, {"tp": 2, "etp": 1}),
    "TP2 EP2": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "PP2": (2, {"pp": 2}),
    "CP2": (2, {"cp": 2}),
}
EXPERT_FOUR: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2 PP2": (4, {"ep": 2, "pp": 2}),
    "EP2 ETP2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "CP2 EP2": (4, {"cp": 2, "ep": 2}),
    "EP2 DP4": (4, {"ep": 2}),
}
SMALL = 64
"""Tokens of a micro-batch that cut the mini-batch into several."""
WHOLE = 100_000


@functools.cache
def base_config() -> MegatronConfig:
    config = load_config().trainer.policy.megatron_config
    return replace(config, logprobs_chunk_size=7)


def layout(processes: int, sizes: dict[str, Any], max_tokens: int = SMALL, **changes: Any) -> Layout:
    megatron = replace(base_config(), **{SHORT[name]: size for name, size in sizes.items()}, **changes)
    return Layout(megatron, processes, max_tokens)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The workers are forked, which a process with OpenMP threads does not survive."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def model(name: str) -> Path:
    return write_family(name, Path(_folder().name, name))


@functools.cache
def reference(name: str) -> tuple[Trial, Outcome, Outcome]:
    """(trial, Hugging Face, one Megatron process with one micro-batch)"""
    trial = make_trial(model(name))
    return trial, hugging_face(trial).outcome, run_layout(trial, layout(1, {}, WHOLE))


def assert_exact(difference: Difference) -> None:
    tensor, worst = max(difference.tensors.items(), key=lambda item: item[1])
    metric, off = max(difference.metrics.items(), key=lambda item: item[1])
    assert difference.gradient <= GRADIENT, f"gradient is off by {difference.gradient:.1e}, {tensor} by {worst:.1e}"
    assert worst <= WORST_TENSOR, f"gradient of {tensor} is off by {worst:.1e}"
    assert difference.logprobs <= LOGPROBS, f"logprobs are off by {difference.logprobs:.1e}"
    assert off <= METRICS, f"metric {metric} is off by {off:.1e}"


def without_buffers(outcome: Outcome, metrics: Any) -> Outcome:
    """Hugging Face has no gradient of buffers (the routers' bias), and its loop computes some of the metrics."""
    gradients = {name: g for name, g in outcome.gradients.items() if not name.endswith("e_score_correction_bias")}
    return Outcome(gradients, outcome.logprobs, {name: outcome.metrics[name] for name in metrics})


def check(name: str, one: Layout) -> None:
    trial, hf, single = reference(name)
    outcome = run_layout(trial, one)
    assert_exact(compare(without_buffers(outcome, hf.metrics), hf))
    assert_exact(compare(outcome, single))


def cases(table: dict[str, tuple[int, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(("processes", "sizes"), table.values(), ids=table)


@cases(DENSE)
def test_a_dense_model_has_hugging_faces_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_tied", layout(processes, sizes))


@cases(EXPERT)
def test_a_mixture_of_experts_has_hugging_faces_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_moe", layout(processes, sizes))


@cases(FOUR)
def test_products_of_parallelism_leave_the_gradient_as_it_is(processes: int, sizes: dict[str, Any]):
    check("qwen3", layout(processes, sizes))


@cases(EXPERT_FOUR)
def test_products_of_expert_parallelism_leave_the_gradient_as_it_is(processes: int, sizes: dict[str, Any]):
    check("qwen3_moe", layout(processes, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MOE])
@cases(DENSE | FOUR)
def test_every_dense_family_has_hugging_faces_gradient(name: str, processes: int, sizes: dict[str, Any]):
    check(name, layout(processes, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
@cases(EXPERT | EXPERT_FOUR)
def test_every_family_of_experts_has_hugging_faces_gradient(name: str, processes: int, sizes: dict[str, Any]):
    check(name, layout(processes, sizes))


@pytest.mark.parametrize("max_tokens", [16, 40, 100, WHOLE])
def test_gradient_is_unchanged_by_the_token_limit(max_tokens: int):
    check("qwen3_tied", layout(2, {"pp": 2}, max_tokens))


@pytest.mark.parametrize("num", [1, 2, 5, 10])
def test_gradient_is_unchanged_by_the_number_of_micro_batches(num: int):
    check("qwen3_tied", replace(layout(2, {}, WHOLE), min_micro_batches=num))


def test_gradient_is_unchanged_by_the_order_of_the_groups():
    trial, hf, _ = reference("qwen3_tied")
    experience = trial.experience
    bounds = experience.cu_seqlens.tolist()
    order = [i for group in (3, 0, 4, 2, 1) for i in (2 * group, 2 * group + 1)]
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    shuffled = replace(
        experience,
        token_ids=experience.token_ids[tokens],
        cu_seqlens=torch.tensor([0] + [bounds[i + 1] - bounds[i] for i in order]).cumsum(0).int(),
        loss_mask=experience.loss_mask[tokens],
        rollout_logprobs=experience.rollout_logprobs[tokens],
        advantages=experience.advantages[order],
        group_ids=experience.group_ids[order],
    )
    moved = replace(
        trial, experience=shuffled, old_offsets=trial.old_offsets[tokens], ref_offsets=trial.ref_offsets[tokens]
    )
    outcome = run_layout(moved, layout(2, {}))
    expected = Outcome(hf.gradients, hf.logprobs[tokens], hf.metrics)
    assert_exact(compare(without_buffers(outcome, hf.metrics), expected))


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_recomputing_activations_leaves_the_gradient_as_it_is(name: str, granularity: str):
    check(name, layout(2, {"pp": 2}, recompute_granularity=granularity))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_is_that_of_the_whole_mini_batch(reduction: str):
    trial = replace(reference("qwen3_tied")[0], reduction=reduction)
    hf = hugging_face(trial).outcome
    outcome = run_layout(trial, layout(2, {}))
    assert_exact(compare(without_buffers(outcome, hf.metrics), hf))


@pytest.mark.parametrize("loss", ["dual_clip", "cispo", "cross_entropy"])
def test_every_loss_has_hugging_faces_gradient(loss: str):
    trial = reference("qwen3_tied")[0]
    trial = replace(trial, objective=replace(trial.objective, loss=loss))
    hf = hugging_face(trial).outcome
    outcome = run_layout(trial, layout(2, {"cp": 2}))
    assert_exact(compare(without_buffers(outcome, hf.metrics), hf))


UNEVEN = [257, 2, 1, 3, 130, 2, 5, 64, 2, 17]
"""Samples of one to 257 tokens, some with a single response token, one with nothing but its first token."""


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [(2, {}), (2, {"pp": 2}), (2, {"cp": 2}), (2, {"tp": 2}), (4, {"pp": 2, "vpp": 2})],
    ids=["DP2", "PP2", "CP2", "TP2 SP", "DP2 PP2 VPP2"],
)
def test_uneven_lengths_neither_deadlock_nor_change_the_gradient(processes: int, sizes: dict[str, Any]):
    trial = make_trial(model("qwen3_tied"), UNEVEN)
    hf = hugging_face(trial).outcome
    assert_exact(compare(without_buffers(run_layout(trial, layout(processes, sizes)), hf.metrics), hf))


@pytest.mark.parametrize("sample_lengths", [[40], [40, 9, 30]], ids=["one rank has none", "one rank has one"])
@pytest.mark.parametrize(
    ("name", "processes", "sizes"),
    [("qwen3_tied", 2, {}), ("qwen3_tied", 4, {"pp": 2}), ("qwen3_moe", 2, {"ep": 2})],
    ids=["DP2", "DP2 PP2", "EP2"],
)
def test_a_rank_with_one_sample_or_none_takes_part(
    name: str, processes: int, sizes: dict[str, Any], sample_lengths: list[int]
):
    trial = make_trial(model(name), sample_lengths)
    hf = hugging_face(trial).outcome
    assert_exact(compare(without_buffers(run_layout(trial, layout(processes, sizes)), hf.metrics), hf))


def test_fully_masked_samples_change_nothing():
    trial = make_trial(model("qwen3_tied"), lengths())
    bounds = trial.experience.cu_seqlens.tolist()
    mask = trial.experience.loss_mask.clone()
    for sample in (0, 1, 5):
        mask[bounds[sample] : bounds[sample + 1]] = False
    trial = replace(trial, experience=replace(trial.experience, loss_mask=mask))
    hf = hugging_face(trial).outcome
    for sizes in ({}, {"cp": 2}):
        assert_exact(compare(without_buffers(run_layout(trial, layout(2, sizes)), hf.metrics), hf))


def test_a_mini_batch_without_a_trained_token_has_a_gradient_of_zero():
    trial = make_trial(model("qwen3_tied"))
    nothing = torch.zeros_like(trial.experience.loss_mask)
    outcome = run_layout(replace(trial, experience=replace(trial.experience, loss_mask=nothing)), layout(2, {"pp": 2}))
    assert all(not gradient.any() for gradient in outcome.gradients.values())
    assert outcome.metrics["policy/final_loss"] == 0
