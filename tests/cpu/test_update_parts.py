"""The parts of an update (benchmarks/update_parts.py), timed in the policy's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from update_parts import REST, WHOLE, Stopwatch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PARTS = {"pack", "zeroing", "forward + backward", "gradients prepared and their norm", "optimizer step", REST, WHOLE}


def test_a_part_within_a_part_belongs_to_the_outer_one():
    watch = Stopwatch()
    inner = watch.around("inner", lambda: time.sleep(0.02))
    watch.around("outer", inner)()
    assert set(watch.seconds) == {"outer"} and watch.seconds["outer"] > 0.02
    inner()
    assert watch.seconds["inner"] > 0.02


def test_the_command_prints_where_the_time_of_an_update_goes(tmp_path: Path):
    result = tmp_path / "result.json"
    sizes = {"gpus": 2, "pp": 2, "samples": 16, "sample-tokens": 64, "max-tokens": 256, "steps": 1}
    command = [sys.executable, "benchmarks/gpu_step.py", "--update-only", "--parts", "--shape=tiny"]
    command += [f"--{name}={size}" for name, size in sizes.items()]
    command += [f"--trace={tmp_path / 'kernels.txt'}", f"--json={result}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    found = json.loads(result.read_text())
    parts, kernels = found["parts_s"], found["kernel_shares"]
    assert set(parts) == PARTS and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(2 * parts[WHOLE], rel=0.2)
    assert parts["forward + backward"] == max(seconds for part, seconds in parts.items() if part != WHOLE)
    assert {"matmul", "attention", "communication", "idle"} <= set(kernels)
