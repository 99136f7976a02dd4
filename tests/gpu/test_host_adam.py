"""On a GPU, Adam with its moments on the host takes the steps of the one that keeps them on the device, bit for bit."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.megatron.optimizer import host_adam
from skyrl_train.megatron.optimizer.adam import FusedAdam
from skyrl_train.megatron.optimizer.host_adam import HostAdam

SIZES = (3_000_001, 7, 129, 5_000_000)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("piece", [1_000_000, 1 << 25], ids=["many pieces", "one piece"])
def test_moments_pass_through_the_device_without_a_difference(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_adam, "PIECE", piece)
    generator = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(size, generator=generator, device="cuda") for size in SIZES]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    ours, plain = HostAdam(mine, lr=1e-2, weight_decay=0.1), FusedAdam(theirs, lr=1e-2, weight_decay=0.1)
    ours.place_moments()
    for _ in range(10):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, device="cuda")
            b.grad = a.grad.clone()
        ours.step()
        plain.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        for name in host_adam.MOMENTS:
            assert ours.state[a][name].device.type == "cpu"
            assert torch.equal(ours.state[a][name], plain.state[b][name].cpu())


@pytest.mark.gpus(1)
def test_a_step_leaves_nothing_on_the_device():
    weights = [torch.nn.Parameter(torch.randn(50_000_000, device="cuda"))]
    adam = HostAdam(weights, lr=1e-2)
    adam.place_moments()
    weights[0].grad = torch.ones_like(weights[0])
    before = torch.cuda.memory_allocated()
    adam.step()
    assert torch.cuda.memory_allocated() - before < 1 << 20
