"""A rank that resumes in another process from its saved state computes what it would have computed in the first."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.config.policy import LoraConfig
from skyrl_train.file_sum import sum_of
from skyrl_train.megatron.optimizer.adam import FusedAdam
from skyrl_train.megatron.residency.state import load_state, save_durable_state, save_state
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import ParallelRanks, Rendezvous
from tests.support.adapters import lora_config
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.policies import build, everything

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


def _updates(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, bool, int, Path | None, bool]) -> dict[str, Any]:
    """Updates before a state is saved or after it was loaded."""
    trial, one, bf16, num_updates, folder, saves = arguments
    policy, batch = build(rendezvous, trial, one, bf16=bf16)
    if folder is not None and not saves:
        policy.load_state(str(folder), 2)
    for _ in range(num_updates):
        policy.keep_old_logprobs(batch)
        policy.update(batch)
    if folder is not None and saves:
        policy.save_state(str(folder))
        return {}
    return {"state": everything(policy), "version": policy.num_steps, "random": torch.rand(3)}


LORA = lora_config(dropout=0.1)
NO_OPTIMIZER = SimpleNamespace(chained_optimizers=[])


@pytest.mark.parametrize(
    ("processes", "sizes", "bf16", "lora"),
    [(1, {}, False, None), (2, {}, True, None), (2, {"pp": 2, "vpp": 2}, True, None), (2, {}, True, LORA)],
    ids=["fp32", "bf16 DP2", "bf16 PP2 VPP2", "adapters bf16 DP2"],
)
def test_processes_that_were_replaced_end_at_the_same_bits(
    processes: int, sizes: dict[str, Any], bf16: bool, lora: LoraConfig | None, dense: Path, tmp_path: Path
):
    trial = replace(make_trial(dense, [7, 30, 12, 9, 25, 40, 3, 18]), lora=lora)
    one = layout(processes, sizes)

    def run(num_updates: int, folder: Path | None, saves: bool) -> list[dict[str, Any]]:
        arguments = (trial, one, bf16, num_updates, folder, saves)
        return run_on_ranks(_updates, arguments, processes, timeout_s=120)

    run(1, tmp_path, True)
    replaced, stayed = run(1, tmp_path, False), run(2, None, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank_{rank}.pt" for rank in range(processes)]
    for mine, theirs in zip(replaced, stayed, strict=True):
        assert mine["version"] == theirs["version"] == 4
        assert mine["state"].keys() == theirs["state"].keys()
        assert not [name for name, tensor in mine["state"].items() if not torch.equal(tensor, theirs["state"][name])]
        assert torch.equal(mine["random"], theirs["random"])
    saved = torch.load(tmp_path / "rank_0.pt")["weights"][0]
    assert all(".lora." in name for name in saved) == (lora is not None), "frozen weights are in the checkpoint already"


def test_dropout_of_adapters_may_begin_where_a_run_resumes(dense: Path, tmp_path: Path):
    trial = make_trial(dense, [7, 30, 12, 9])
    before, after = (replace(trial, lora=lora_config(dropout=dropout)) for dropout in (0.0, 0.1))
    run_on_ranks(_updates, (before, layout(1, {}), True, 1, tmp_path, True), 1, timeout_s=120)
    one, other = (
        run_on_ranks(_updates, (resumed, layout(1, {}), True, 1, tmp_path, False), 1, timeout_s=120)[0]
        for resumed in (before, after)
    )
    assert one["version"] == other["version"] == 4
    assert any(not torch.equal(tensor, other["state"][name]) for name, tensor in one["state"].items())


def _load_elsewhere(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, Path, int]) -> str:
    trial, one, folder, version = arguments
    policy, _ = build(rendezvous, trial, one, bf16=False)
    try:
        policy.load_state(str(folder), version)
    except ValueError as error:
        return str(error)
    return "no error"


def test_the_state_of_another_layout_version_or_model_is_refused(dense: Path, tmp_path: Path):
    trial = make_trial(dense, [7, 30, 12, 9])
    run_on_ranks(_updates, (trial, layout(1, {}), False, 0, tmp_path, True), 1, timeout_s=120)
    other_layout = run_on_ranks(_load_elsewhere, (trial, layout(2, {"tp": 2}), tmp_path, 0), 2, timeout_s=120)
    assert "has the weights of another model or layout" in other_layout[0]
    assert "saved by fewer ranks" in other_layout[1]
    (message,) = run_on_ranks(_load_elsewhere, (trial, layout(1, {}), tmp_path, 7), 1, timeout_s=120)
    assert "has policy version 0, expected 7: another run writes into the same folder" in message
    other = make_trial(write_family("qwen2", tmp_path / "other"), [7, 30, 12, 9])
    (message,) = run_on_ranks(_load_elsewhere, (other, layout(1, {}), tmp_path, 0), 1, timeout_s=120)
    assert "has the weights of another model or layout" in message


class _Frozen(torch.nn.Module):
    """Two weights, of which all or the last one are trained."""

    def __init__(self, *, trains_first: bool) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2), requires_grad=trains_first)
        self.last = torch.nn.Parameter(torch.zeros(3))


def test_the_state_of_a_run_that_trained_other_weights_is_refused(tmp_path: Path):
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    file = tmp_path / "rank_0.pt"
    save_state(file, [_Frozen(trains_first=False)], NO_OPTIMIZER, ranks, 3)
    load_state(file, [_Frozen(trains_first=False)], NO_OPTIMIZER, ranks, 3)
    with pytest.raises(ValueError, match="from a run that trained other weights: only one run trained first"):
        load_state(file, [_Frozen(trains_first=True)], NO_OPTIMIZER, ranks, 3)


def test_the_state_of_weights_in_another_order_is_refused(tmp_path: Path):
    """As Transformer Engine's experts are; the optimizer's state goes by position."""
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    file = tmp_path / "rank_0.pt"
    one, other = _Frozen(trains_first=True), torch.nn.Module()
    save_state(file, [one], NO_OPTIMIZER, ranks, 3)
    other.last, other.first = one.last, one.first
    with pytest.raises(ValueError, match="has the weights of another model or layout, or of other layers"):
        load_state(file, [other], NO_OPTIMIZER, ranks, 3)


def test_adam_continues_with_its_moments_and_steps_and_with_the_settings_of_the_configuration(tmp_path: Path):
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)

    def trained(beta: float, num_steps: int) -> tuple[_Frozen, FusedAdam, Any]:
        module = _Frozen(trains_first=True)
        adam = FusedAdam(list(module.parameters()), lr=0.1, betas=(beta, 0.9))
        for _ in range(num_steps):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
        return module, adam, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])

    file = tmp_path / "rank_0.pt"
    before, saved, optimizer = trained(0.5, num_steps=2)
    save_state(file, [before], optimizer, ranks, 2)
    after, loaded, optimizer = trained(0.8, num_steps=0)
    load_state(file, [after], optimizer, ranks, 2)
    (group,) = loaded.param_groups
    assert (group["step"], group["betas"]) == (2, (0.8, 0.9))
    for mine, theirs in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs) and torch.equal(loaded.state[mine]["exp_avg"], saved.state[theirs]["exp_avg"])


class _FullDisk(io.RawIOBase):
    """Takes a kilobyte."""

    taken = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.taken += len(data)
        if self.taken > 1024:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)


@pytest.mark.parametrize("save", [save_state, save_durable_state])
def test_a_full_disk_is_said_to_be_full(save: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch's writer says that it is at an unexpected position."""
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    monkeypatch.setattr(Path, "open", lambda path, mode: _FullDisk())
    with pytest.raises(OSError, match=r"No space left on device: '.*rank_0.tmp'"):
        save(tmp_path / "rank_0.pt", [_Frozen(trains_first=True)], NO_OPTIMIZER, ranks, 3)


def test_an_older_state_makes_room_before_the_new_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    file, save, found = tmp_path / "rank_0.pt", torch.save, []

    def full(state: Any, target: Any) -> None:
        found.append(sorted(one.name for one in tmp_path.iterdir() if one.stat().st_size))
        save(state, target)
        if len(found) == 3:
            raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    for version in (1, 2):
        save_state(file, [_Frozen(trains_first=True)], NO_OPTIMIZER, ranks, version)
        load_state(file, [_Frozen(trains_first=True)], NO_OPTIMIZER, ranks, version)
    with pytest.raises(OSError, match="No space left"):
        save_state(file, [_Frozen(trains_first=True)], NO_OPTIMIZER, ranks, 3)
    assert found == [[], [], []] and not file.exists(), "half a state never has the name of a whole one"


def test_a_durable_state_comes_with_the_sum_of_its_file_and_loads_as_any_other(tmp_path: Path):
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    file, module, loaded = tmp_path / "rank_0.pt", _Frozen(trains_first=True), _Frozen(trains_first=True)
    torch.nn.init.ones_(module.last)
    written = save_durable_state(file, [module], NO_OPTIMIZER, ranks, 3)
    load_state(file, [loaded], NO_OPTIMIZER, ranks, 3)
    assert torch.equal(loaded.last, module.last) and written == sum_of(file)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.pt"]
