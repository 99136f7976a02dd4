"""What an optimizer step does for all parameters at once, against what Megatron does for one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from skyrl_train.megatron.optimizer import many_tensors
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial
from tests.support.layouts import layout, model
from tests.support.policies import build


def _copied(policy: Any, parts: list[Any], *, megatrons: bool) -> list[Tensor]:
    """The model's weights, zeros before, after the copies of this rank's float32 ones."""
    weights = list(policy.model.chunks[0].parameters())
    for weight in weights:
        weight.zero_()
    for part in parts:
        (type(part) if megatrons else part)._copy_main_params_to_model_params(*([part] if megatrons else []))
    return [weight.detach().clone() for weight in weights]


def _gradients(part: Any) -> list[Tensor]:
    return [parameter.grad for parameter in part.get_parameters()]


def _compared(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> int:
    """After an offload, which every view must survive; parameters of this rank."""
    trial, one = arguments
    policy, batch = build(rendezvous, trial, one, bf16=True)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    policy.offload()
    policy.reload()
    parts = [part for part in policy._optimizer.chained_optimizers if not part.is_stub_optimizer]
    for buffer in policy.model.chunks[0].buffers + policy.model.chunks[0].expert_parallel_buffers:
        buffer.grad_data.normal_()
    with torch.no_grad():
        for part in parts:
            for parameter in part.get_parameters():
                parameter.normal_()
            type(part)._copy_model_grads_to_main_grads(part)
            theirs = _gradients(part)
            part.zero_grad()
            part.prepare_grads()
            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(_gradients(part), theirs, strict=True))
        megatrons, ours = _copied(policy, parts, megatrons=True), _copied(policy, parts, megatrons=False)
        assert all(torch.equal(a, b) for a, b in zip(ours, megatrons, strict=True))
        assert sum(int(one.count_nonzero()) for one in ours) > 1000
        for norm in (0.5, 3.0):
            before = [[gradient.clone() for gradient in _gradients(part)] for part in parts]
            many_tensors.clip(policy._optimizer, norm)
            for part, saved in zip(parts, before, strict=True):
                scaled = [gradient.clone() for gradient in _gradients(part)]
                for gradient, old in zip(_gradients(part), saved, strict=True):
                    gradient.copy_(old)
                clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, norm)
                assert all(torch.equal(a, b) for a, b in zip(scaled, _gradients(part), strict=True))
                assert torch.equal(scaled[0], saved[0]) == (norm < part.config.clip_grad)
    return len(megatrons)


@pytest.mark.parametrize(("processes", "sizes"), [(1, {}), (2, {}), (2, {"ep": 2})], ids=["one", "DP2", "EP2"])
def test_gradients_weights_and_clipping_are_megatrons(processes: int, sizes: dict[str, Any]):
    trial = make_trial(model("qwen3_moe"), [20, 31, 9, 27, 14, 30, 8, 25])
    found = run_on_ranks(_compared, (trial, layout(processes, sizes)), processes, timeout_s=100)
    assert min(found) > 20


@pytest.mark.parametrize("num", [1, 3])
def test_the_norm_of_many_tensors_is_that_of_one(num: int):
    tensors = [torch.randn(1 + 1000 * index, generator=torch.Generator().manual_seed(index)) for index in range(num)]
    norm, _ = many_tensors._l2_norm(0, torch.zeros(1), [tensors], False)
    assert float(norm) == pytest.approx(float(torch.cat(tensors).double().norm()), rel=1e-7)
