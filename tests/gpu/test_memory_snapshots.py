"""Real snapshots of a policy's memory: what they name, and that running out of memory leaves one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.policy import TorchProfilerConfig
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout

pytestmark = pytest.mark.timeout(300)
FAR_TOO_MUCH = 1 << 45
"""Bytes; more than any GPU has."""


def _update_then_run_out(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> int:
    """Bytes that torch counted after the first update; the second one asks for too much."""
    trial, one = arguments
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, OPTIMIZER, objective, bf16=True, seed=1, num_optimizer_steps=2
    )
    batch = share_of(trial, one, policy.ranks)
    policy.update(batch)
    allocated = torch.cuda.memory_allocated()
    # So that torch refuses by itself, without taking all there is first.
    torch.cuda.set_per_process_memory_fraction(1.0)
    step = policy._optimizer.step_with_ready_grads
    policy._optimizer.step_with_ready_grads = lambda: (
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8, device="cuda"),
        step(),
    )
    with pytest.raises(torch.OutOfMemoryError):
        policy.update(batch)
    return allocated


def read(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(blocks in use, events) of the one device."""
    snapshot = pickle.loads(file.read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    events = [event for events in snapshot["device_traces"] for event in events]
    return [block for block in blocks if block["state"] == "active_allocated"], events


def callers(entries: list[dict[str, Any]]) -> set[str]:
    """Functions of this project in the stacks of the entries."""
    frames = [frame for entry in entries for frame in entry["frames"]]
    return {frame["name"].rsplit(".")[-1] for frame in frames if "skyrl_train" in frame["filename"]}


@pytest.mark.gpus(1)
def test_a_snapshot_names_who_holds_memory_and_an_update_that_runs_out_leaves_one(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path / "model"))
    files = tmp_path / "profiles"
    profiler = TorchProfilerConfig(enable=False, record_memory=True, ranks=(0,), steps=(1,), save_path=str(files))
    one = layout(1, {}, torch_profiler_config=profiler)
    allocated = run_on_ranks(_update_then_run_out, (trial, one), 1, timeout_s=200)[0]

    assert {file.name for file in files.iterdir()} == {
        "policy-0_step1_update.pickle",
        "policy-0_step2_update_oom.pickle",
    }
    held, events = read(files / "policy-0_step1_update.pickle")
    assert abs(sum(block["size"] for block in held) - allocated) < 1 << 20
    assert {"build_model", "build_optimizer"} & callers(held), "what was taken before the update is explained too"
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    asking = callers([event for event in events if event["action"] == "alloc"])
    assert "forward_backward" in asking and "build_model" not in asking, "the events are the update's own"

    held, events = read(files / "policy-0_step2_update_oom.pickle")
    asked = [event["size"] for event in events if event["action"] == "oom"]
    assert held and asked and max(asked) >= FAR_TOO_MUCH
