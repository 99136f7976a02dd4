"""The benchmark of offload and reload (benchmarks/offload.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from offload import Rank, summary

ROOT = Path(__file__).parents[2]


def test_of_each_turn_the_slowest_rank_counts():
    fast = Rank(8_000_000_000, 1.0, [0.20, 0.30, 0.20], [0.25, 0.25, 0.25], (50e9, 40e9), 2**30, 2**28)
    slow = Rank(10_000_000_000, 2.0, [0.25, 0.20, 0.40], [0.20, 0.25, 0.30], (50e9, 40e9), 2**31, 2**27)
    found = summary([fast, slow])
    assert found["out s"] == 0.30 and found["back s"] == 0.25
    assert found["out GB/s"] == pytest.approx(10 / 0.30) and found["pinned copies back GB/s"] == pytest.approx(40)
    assert found["share of pinned copies"] == pytest.approx((0.20 + 0.25) / 0.55)
    assert (
        found["first offload s"] == 2.0
        and found["left outside torch GiB"] == 2.0
        and found["left by torch GiB"] == 0.25
    )


@pytest.mark.slow
def test_two_ranks_measure_the_bytes_of_their_stage(tmp_path: Path):
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/offload.py", "--shape=tiny", "--gpus=2", "--pp=2", "--turns=2"]
    done = subprocess.run([*command, f"--json={result}"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [len(rank["out_s"]) for rank in found["ranks"]] == [2, 2]
    # A layer of the tiny shape has 147,776 parameters, and both stages hold its 131,072 embeddings; 2 + 12 bytes each.
    assert found["GB of a rank"] == pytest.approx((147_776 + 131_072) * 14e-9, rel=0.01)
    assert found["share of pinned copies"] > 0
