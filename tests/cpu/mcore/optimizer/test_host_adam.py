"""Adam whose moments stay in host memory takes the steps of the one that keeps them on the device, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.megatron.optimizer import host_adam
from skyrl_train.megatron.optimizer.adam import FusedAdam
from skyrl_train.megatron.optimizer.host_adam import HostAdam
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.policies import build, everything


@pytest.mark.parametrize("piece", [64, 200, 10_000], ids=["cuts every parameter", "cuts some", "one piece"])
def test_pieces_take_the_steps_of_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_adam, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (413, 1, 70, 130)]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
    ours, plain = (
        kind([{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}], **settings)
        for kind, params in ((HostAdam, mine), (FusedAdam, theirs))
    )
    assert isinstance(ours, HostAdam)
    ours.place_moments()
    for step in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = None if len(a) == 70 and step == 1 else torch.randn(a.shape, generator=generator)
            b.grad = None if a.grad is None else a.grad.clone()
        ours.step()
        plain.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        for name in host_adam.MOMENTS:
            assert torch.equal(ours.state[a][name], plain.state[b][name])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


def _updates(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, Path, bool, bool]) -> dict[str, torch.Tensor]:
    trial, one, folder, loads, saves = arguments
    host_adam.PIECE = 1000
    policy, batch = build(rendezvous, trial, one, bf16=True)
    if loads:
        policy.load_state(str(folder), 2)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    policy.offload()
    policy.reload()
    if saves:
        policy.save_state(str(folder))
    return everything(policy)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["from the device", "from the host"])
def test_a_run_may_move_its_moments_when_it_resumes(first: bool, dense: Path, tmp_path: Path):
    """Two ranks share the optimizer; the weights, the moments and the saved state are those of the run that did not."""
    trial = make_trial(dense, [7, 30, 12, 9, 25, 40, 3, 18])
    kinds = {on_host: layout(2, {}, optimizer_cpu_offload=on_host) for on_host in (False, True)}

    def run(on_host: bool, folder: str, *, loads: bool) -> list[dict[str, torch.Tensor]]:
        given = (trial, kinds[on_host], tmp_path / folder, loads, not loads)
        return run_on_ranks(_updates, given, 2, timeout_s=120)

    for loads, moved in ((False, first), (True, not first)):
        for mine, theirs in zip(run(moved, "moved", loads=loads), run(False, "kept", loads=loads), strict=True):
            assert mine.keys() == theirs.keys() and any(name.startswith("exp_avg_sq") for name in mine)
            assert not [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
