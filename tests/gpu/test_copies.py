"""The optimizer comes back while an update computes, and the optimizer's step finds all of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.residency.host_memory import CopyStream
from skyrl_train.megatron.residency.memory import torch_optimizers
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.types import TrainBatch
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout

pytestmark = pytest.mark.timeout(300)
LATE_CYCLES = 8_000_000_000
"""Of the GPU's clock: four seconds."""
ADAM = replace(OPTIMIZER, lr=1e-4)


def _policy(rendezvous: Rendezvous, trial: Trial, one: Layout) -> tuple[MegatronPolicy, TrainBatch]:
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, ADAM, objective, bf16=True, seed=1, num_optimizer_steps=4
    )
    return policy, share_of(trial, one, policy.ranks)


def _update_with_late_copies(
    rendezvous: Rendezvous, arguments: tuple[Trial, Layout]
) -> tuple[float, bool, float, float]:
    """(seconds of the reload, whether the copies were under way when the optimizer's step was reached, largest step of
    an update, the same where the optimizer came late)."""
    policy, batch = _policy(rendezvous, *arguments)

    def weights() -> torch.Tensor:
        parameters = [p for group in policy._optimizer.param_groups for p in group["params"]]
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    policy.update(batch)
    policy.offload()  # once before: an update after the first offload waits for copies (gpu_performance.md)
    policy.reload()
    policy.update(batch)
    before = weights()
    policy.update(batch)
    on_time = float((weights() - before).abs().max())
    before = weights()
    policy.offload()
    policy.reload("weights")
    copies, under_way = policy._memory._host._copies, []
    settle = copies.settle
    with copies.copying():
        torch.cuda._sleep(LATE_CYCLES)
    started = time.perf_counter()
    policy.reload("optimizer")
    reload_s = time.perf_counter() - started
    copies.settle = lambda: (under_way.append(not copies._stream.query()), settle())  # type: ignore[method-assign]
    policy.update(batch)
    return reload_s, under_way[0], on_time, float((weights() - before).abs().max())


@pytest.mark.gpus(1)
def test_an_update_waits_for_an_optimizer_that_comes_late(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path / "model"))
    ((reload_s, under_way, on_time, late),) = run_on_ranks(
        _update_with_late_copies, (trial, layout(1, {})), 1, timeout_s=200
    )
    print({"reload_s": reload_s, "on time": on_time, "late": late})
    assert reload_s < 0.5 and under_way, "nobody waits for the copies before the optimizer's step"
    assert 0 < on_time < 4 * ADAM.lr, "Adam's steps are about as long as its learning rate"
    assert 0 < late < 4 * ADAM.lr


def _update_with_a_late_optimizer(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> list[float]:
    """Seconds of updates by their own clock, before and after the device was given work with the optimizer's step."""
    policy, batch = _policy(rendezvous, *arguments)
    policy.update(batch)
    on_time = policy.update(batch).seconds
    (adam,) = torch_optimizers(policy._optimizer)
    adam.register_step_post_hook(lambda *_: torch.cuda._sleep(LATE_CYCLES))
    return [on_time, policy.update(batch).seconds]


@pytest.mark.gpus(1)
def test_the_optimizers_step_is_a_part_of_the_update(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path / "model"))
    ((on_time, late),) = run_on_ranks(_update_with_a_late_optimizer, (trial, layout(1, {})), 1, timeout_s=200)
    assert late > on_time + 2, "the device is busy for four seconds"


@pytest.mark.gpus(1)
def test_a_copy_finds_what_the_device_was_asked_for_before():
    """As an offload right after an update: the optimizer's step is still to be computed when copies are asked for."""
    copies, there = CopyStream(), torch.zeros(1 << 20, device="cuda")
    here = torch.zeros(1 << 20).pin_memory()
    torch.cuda._sleep(LATE_CYCLES)
    there.fill_(1)
    with copies.copying():
        here.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert here.eq(1).all()


@pytest.mark.gpus(1)
def test_what_comes_after_settle_finds_what_was_copied():
    copies, there = CopyStream(), torch.zeros(1 << 20, device="cuda")
    here = torch.ones(1 << 20).pin_memory()
    with copies.copying():
        torch.cuda._sleep(LATE_CYCLES)
        there.copy_(here, non_blocking=True)
    too_early = there.clone()
    copies.settle()
    assert torch.equal(there.cpu(), here) and not too_early.any()
