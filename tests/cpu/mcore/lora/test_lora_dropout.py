"""Dropout of the adapters' inputs: unbiased, in training passes only, with the random numbers parallelism needs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, run_layout
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import compare
from skyrl_train.ranks import Rendezvous
from tests.support.adapters import write_adapter
from tests.support.families import make_trial, write_family
from tests.support.layouts import assert_exact, layout

RATE = 0.25


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


def test_evaluation_drops_nothing_and_training_does(dense: Path, tmp_path: Path):
    """One optimizer step's logprobs, loss and gradient, with and without."""
    lora = write_adapter(tmp_path / "adapter", dense)
    trial = make_trial(dense)
    plain = run_layout(replace(trial, lora=lora), layout(1, {}))
    # alpha and rank are those of the file, and dropout is no property of the tensors.
    dropped = run_layout(replace(trial, lora=replace(lora, dropout=RATE)), layout(1, {}))
    assert torch.equal(plain.logprobs, dropped.logprobs)
    assert plain.metrics["policy/final_loss"] != dropped.metrics["policy/final_loss"]
    name = next(iter(plain.gradients))
    assert not torch.equal(plain.gradients[name], dropped.gradients[name])


def _drop(rendezvous: Rendezvous, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What each kind of layer leaves of ones, by local name; twice, to see that it differs each time."""
    path, megatron, lora = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True, lora=lora)
    build_optimizer(model, OPTIMIZER)
    ones = torch.ones(200, 1, 64)
    return {
        name: torch.stack([module.lora._drop(ones), module.lora._drop(ones)])
        for name, module in model.modules[0].decoder.layers[0].named_modules()
        if hasattr(module, "lora")
    }


def drop(path: Path, sizes: dict[str, Any], tmp_path: Path, processes: int = 2) -> list[dict[str, Any]]:
    lora = replace(write_adapter(tmp_path / "adapter", path), dropout=RATE)
    return run_on_ranks(_drop, (str(path), layout(processes, sizes).megatron, lora), processes, timeout_s=120)


def pairs_that_drop_the_same(ranks: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    numbered = itertools.combinations(enumerate(ranks), 2)
    return [(i, j, name) for (i, one), (j, other) in numbered for name in one if torch.equal(one[name], other[name])]


def test_a_quarter_is_dropped_and_the_rest_makes_up_for_it(dense: Path, tmp_path: Path):
    first, _ = drop(dense, {"tp": 2}, tmp_path)
    for name, left in first.items():
        # 25600 draws: five standard deviations of the share are 0.014.
        assert float((left == 0).float().mean()) == pytest.approx(RATE, abs=0.014), name
        assert left.unique().tolist() == pytest.approx([0.0, 1 / (1 - RATE)])
        assert not torch.equal(left[0], left[1]), "the same mask again"


def test_ranks_with_the_same_input_drop_the_same(dense: Path, tmp_path: Path):
    """Without sequence parallelism both ranks of a column-parallel layer hold all of its input."""
    first, second = drop(dense, {"tp": 2, "sp": False}, tmp_path)
    same = {name: torch.equal(first[name], second[name]) for name in first}
    assert same == {
        "self_attention.linear_proj": False,
        "self_attention.linear_qkv": True,
        "mlp.linear_fc1": True,
        "mlp.linear_fc2": False,
    }


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [(2, {"tp": 2}), (4, {"cp": 2}), (4, {"cp": 2, "pp": 2})],
    ids=["TP2 SP", "CP2 DP2", "CP2 PP2"],
)
def test_ranks_with_different_tokens_use_different_random_numbers(
    processes: int, sizes: dict[str, Any], dense: Path, tmp_path: Path
):
    """So do stages, which have the same tokens in other layers."""
    assert pairs_that_drop_the_same(drop(dense, sizes, tmp_path, processes)) == []


def test_ranks_that_share_experts_drop_the_same_of_their_tokens(experts: Path, tmp_path: Path):
    assert pairs_that_drop_the_same(drop(experts, {"tp": 2}, tmp_path)) == [(0, 1, "mlp.experts.linear_fc1")]


def test_replicas_of_experts_and_other_experts_use_different_random_numbers(experts: Path, tmp_path: Path):
    assert pairs_that_drop_the_same(drop(experts, {"ep": 2}, tmp_path, 4)) == []


def test_recomputed_activations_drop_what_they_dropped_before(dense: Path, tmp_path: Path):
    lora = replace(write_adapter(tmp_path / "adapter", dense), dropout=RATE)
    trial = replace(make_trial(dense), lora=lora)
    kept, recomputed = (run_layout(trial, layout(1, {}, recompute_granularity=one)) for one in (None, "full"))
    assert_exact(compare(recomputed, kept))
