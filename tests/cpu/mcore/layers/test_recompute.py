"""Inputs of matrix products that are computed again instead of being saved."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from skyrl_train.megatron.layers import layers, swiglu
from skyrl_train.megatron.layers.norm import rms_norm
from skyrl_train.megatron.layers.recompute import CHEAP, unsaved
from skyrl_train.megatron.passes.step import forward_backward
from skyrl_train.megatron.verify.layout_check import Layout
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.ranks import Rendezvous
from tests.support.layouts import join_and_pack, layout, reference


def test_an_unsaved_input_is_freed_and_computed_again_once():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    scale, calls = torch.ones(8), []

    def again() -> Tensor:
        calls.append(1)
        return rms_norm(x.detach(), scale, 1e-6)

    normed = rms_norm(x, scale, 1e-6)
    with unsaved(normed, again):
        out = torch.nn.functional.linear(normed, weight)
    freed = weakref.ref(normed.untyped_storage())
    expected = normed.detach().clone()
    del normed
    gc.collect()
    assert freed() is None
    out.sum().backward()
    assert len(calls) == 1
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(5, 3).t() @ expected)


def _calls(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> tuple[int, int]:
    """Number of times that one pass computes a norm in front of a product, and SwiGLU."""
    counts = [0, 0]

    def counted(index: int, function: Any) -> Any:
        def count(*args: Any) -> Any:
            counts[index] += 1
            return function(*args)

        return count

    layers.rms_norm, swiglu.swiglu = counted(0, layers.rms_norm), counted(1, swiglu.swiglu)
    trial, one = arguments
    model, micro_batches = join_and_pack(rendezvous, trial, one, torch.float32)
    forward_backward(model, micro_batches, trial.objective, with_entropy=False)
    return counts[0], counts[1]


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_the_layers_compute_their_cheap_outputs_again(name: str):
    def calls(**changes: Any) -> tuple[int, int]:
        return run_on_ranks(_calls, (reference(name)[0], layout(1, {}, **changes)), 1, timeout_s=120)[0]

    norms, activations = calls()
    again = calls(recompute_granularity="selective", recompute_modules=CHEAP)
    assert again[1] == 2 * activations > 0
    assert norms < again[0] < 2 * norms, "norms that are layers by themselves stay as they are"


def test_only_the_first_layers_are_computed_again():
    trial = reference("qwen3_tied")[0]

    def activations(**changes: Any) -> int:
        return run_on_ranks(_calls, (trial, layout(1, {}, **changes)), 1, timeout_s=120)[0][1]

    once = activations()
    one, whole = (activations(recompute_granularity="full", recompute_num_layers=num) for num in (1, None))
    assert whole == 2 * once
    assert one == once + once // AutoConfig.from_pretrained(trial.model_path).num_hidden_layers


def test_other_tensors_are_saved_as_they_are():
    x, weight = torch.randn(5, 8), torch.randn(3, 8, requires_grad=True)
    with unsaved(torch.randn(5, 8), functools.partial(torch.zeros, 5, 8)):
        out = torch.nn.functional.linear(x, weight)
    out.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(5, 3).t() @ x)
