"""Snapshots of device memory: which are written, and under which name. tests/gpu reads a real one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.policy import TorchProfilerConfig
from skyrl_train.megatron.passes import profiling
from skyrl_train.megatron.passes.profiling import Tracer

SIGNATURE = inspect.signature(torch.cuda.memory._record_memory_history)


@dataclass
class Allocator:
    """Stands where a GPU's allocator would: the events since the history was last emptied, and whether it records."""

    recording: bool = False
    events: list[str] = field(default_factory=list)
    limits: set[int] = field(default_factory=set)

    def record(self, *args: Any, **kwargs: Any) -> None:
        given = SIGNATURE.bind(*args, **kwargs).arguments
        self.recording = given["enabled"] == "all"
        self.limits.add(given["max_entries"])
        if given["clear_history"]:
            self.events.clear()

    def dump(self, filename: str) -> None:
        assert self.recording
        Path(filename).write_text(" ".join(self.events))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    stand_in = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", stand_in.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", stand_in.dump)
    monkeypatch.setattr(profiling, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    return stand_in


def snapshots(folder: Path, steps: tuple[int, ...] = (2,), ranks: tuple[int, ...] = (0,)) -> TorchProfilerConfig:
    return TorchProfilerConfig(enable=False, record_memory=True, ranks=ranks, steps=steps, save_path=str(folder))


def written(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()} if folder.exists() else {}


def run_out(tracer: Tracer, allocator: Allocator) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="all of it"), tracer("update"):
        allocator.events.append("oom")
        raise torch.OutOfMemoryError("all of it")


def test_each_pass_of_the_chosen_step_has_a_snapshot_with_its_own_events(tmp_path: Path, allocator: Allocator):
    tracer = Tracer(snapshots(tmp_path / "profiles"), "policy", 0)
    assert allocator.recording, "what the model takes is recorded too"
    for step in (1, 2, 3):
        for name in ("old_logprobs", "update"):
            allocator.events.append("between")
            with tracer(name):
                allocator.events.append(f"{name}{step}")
        tracer.step += 1
    assert written(tmp_path / "profiles") == {
        "policy-0_step2_old_logprobs.pickle": "old_logprobs2",
        "policy-0_step2_update.pickle": "update2",
    }
    assert allocator.limits == {profiling.MAX_EVENTS}


@pytest.mark.parametrize("steps", [(2,), ()])
def test_a_pass_that_runs_out_of_memory_leaves_a_snapshot_in_any_step(
    tmp_path: Path, allocator: Allocator, steps: tuple[int, ...]
):
    tracer = Tracer(snapshots(tmp_path, steps), "policy", 0)
    tracer.step = 7
    run_out(tracer, allocator)
    assert written(tmp_path) == {"policy-0_step7_update_oom.pickle": "oom"}


def test_the_chosen_step_that_runs_out_of_memory_has_that_snapshot_alone(tmp_path: Path, allocator: Allocator):
    tracer = Tracer(snapshots(tmp_path, (1,)), "policy", 0)
    run_out(tracer, allocator)
    assert set(written(tmp_path)) == {"policy-0_step1_update_oom.pickle"}


def test_other_errors_leave_none(tmp_path: Path, allocator: Allocator):
    tracer = Tracer(snapshots(tmp_path, (1,)), "policy", 0)
    with pytest.raises(RuntimeError, match="NCCL"), tracer("update"):
        raise RuntimeError("NCCL")
    assert not written(tmp_path)


def test_a_full_disk_does_not_hide_that_memory_ran_out(
    tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(filename: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    run_out(Tracer(snapshots(tmp_path), "policy", 0), allocator)
    assert "No space left on device" in caplog.text


def test_ranks_that_are_not_chosen_record_nothing(tmp_path: Path, allocator: Allocator):
    with Tracer(snapshots(tmp_path, (1,), ranks=(1,)), "policy", 0)("update"):
        pass
    assert not allocator.recording and not written(tmp_path)


def test_a_process_without_a_gpu_refuses_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiling, "device_type", lambda: "cpu")
    with pytest.raises(ValueError, match="record_memory is true, but there is no GPU. Set it to false"):
        Tracer(snapshots(tmp_path), "policy", 0)
