"""A rank that resumes from its saved state on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.policy import LoraConfig
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.adapters import lora_config
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.policies import build, everything

State = dict[str, torch.Tensor]


def _resumed(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, Path, bool]) -> tuple[State, State, torch.Tensor]:
    """What a rank holds when it saved or loaded its state, what it holds an update later, and random numbers of it."""
    trial, one, folder, saves = arguments
    policy, batch = build(rendezvous, trial, one, bf16=True)
    if saves:
        policy.keep_old_logprobs(batch)
        policy.update(batch)
        policy.offload()
        policy.reload()
        policy.save_state(str(folder))
    else:
        policy.load_state(str(folder), 2)
    drawn = torch.rand(3, device="cuda").cpu()
    before = _on_host(everything(policy))
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    return before, _on_host(everything(policy)), drawn


def _on_host(state: State) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("sizes", "lora"),
    [
        pytest.param({}, None, marks=pytest.mark.gpus(1), id="one"),
        pytest.param({}, lora_config(dropout=0.1), marks=pytest.mark.gpus(1), id="adapters"),
        pytest.param({"pp": 2}, None, marks=pytest.mark.gpus(2), id="PP2"),
        pytest.param({"tp": 2}, None, marks=pytest.mark.gpus(2), id="TP2"),
    ],
)
def test_replaced_ranks_hold_the_same_bits_and_continue_alike(
    sizes: dict[str, Any], lora: LoraConfig | None, tmp_path: Path
):
    """After an offload and a reload, which may still be under way when the state is asked for."""
    num_ranks = 2 if sizes else 1
    folder = write_family("qwen3_tied", tmp_path / "model")
    trial = replace(make_trial(folder, [7, 30, 12, 9, 25, 40, 3, 18]), lora=lora)
    stayed, replaced = (
        run_on_ranks(_resumed, (trial, layout(num_ranks, sizes), tmp_path, saves), num_ranks, timeout_s=120)
        for saves in (True, False)
    )
    for mine, theirs in zip(replaced, stayed, strict=True):
        assert mine[0].keys() == theirs[0].keys()
        assert not [name for name, tensor in mine[0].items() if not torch.equal(tensor, theirs[0][name])]
        assert torch.equal(mine[2], theirs[2]), "drawn numbers"
        for name, tensor in mine[1].items():  # attention's gradients add up in any order
            torch.testing.assert_close(tensor, theirs[1][name], rtol=2e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
