"""Memory outside torch's allocator (benchmarks/device_memory.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import memory_watch
import pytest
import torch
from memory_watch import OutsideTorch, Watch

from skyrl_train.nvml import DeviceUse

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
STAGES = ["start", "join", "build", "logprobs", "update", "second update", "optimizer offloaded", "export", "offloaded"]


def test_growth_is_named_by_the_operation_or_by_what_came_before_it():
    used = [0]

    @torch.library.custom_op("skyrl_train_test::take", mutates_args=())
    def take(x: torch.Tensor, mib: int) -> torch.Tensor:
        used[0] += mib * MIB
        return x.clone()

    x = torch.ones(2)
    watch = Watch(lambda: used[0], 4 * MIB)
    with watch:
        watch.stage = "first"
        take(x, 8)
        take(x, 3)
        watch.stage = "second"
        take(x, 3)
        used[0] += 5 * MIB
        x.sin()
    take(x, 100)
    found = [(one.stage, one.num_bytes // MIB, one.operation) for one in watch.growths]
    assert found == [
        ("first", 8, "skyrl_train_test.take.default"),
        ("second", 6, "skyrl_train_test.take.default"),
        ("second", 5, "before aten.sin.default"),
    ]


def test_what_others_used_before_and_what_torch_has_is_not_outside(monkeypatch: pytest.MonkeyPatch):
    before = [DeviceUse("0", 140 * GIB, 140 * GIB), DeviceUse("1", 100 * GIB, 140 * GIB)]
    chosen: list[int] = []
    monkeypatch.setattr(memory_watch, "device_type", lambda: "cuda")
    monkeypatch.setattr(memory_watch, "synchronize", lambda: None)
    monkeypatch.setattr(memory_watch, "devices_in_use", lambda count: before[:count])
    monkeypatch.setattr(memory_watch, "memory_in_use", lambda: {"free": 88.0 * GIB, "reserved": 9.0 * GIB})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert OutsideTorch(1)() == 3 * GIB and chosen == [1]


def test_the_command_reads_every_stage_of_a_policy(tmp_path: Path):
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/device_memory.py", "--shape=tiny", "--operations", f"--json={result}"]
    command += ["--samples=8", "--sample-tokens=64", "--max-tokens=256", "--gpus=2", "--tp=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(result.read_text())
    assert [[stage["name"] for stage in stages] for stages in found["ranks"]] == [[*STAGES, "cache emptied"]] * 2
    assert all(stage["outside_bytes"] > 0 for stages in found["ranks"] for stage in stages)
    assert "after" in ended.stdout and "optimizer offloaded" in ended.stdout
    assert {growth["stage"] for growth in found["growths"]} & {"build", "logprobs", "update"}
