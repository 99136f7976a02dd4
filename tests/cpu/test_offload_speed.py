"""The benchmark of offload and reload (benchmarks/offload.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_step import make_model, update_job
from offload import Rank, arguments, summary, turns

from skyrl_train.megatron.local_ranks import run_on_ranks


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
    args = arguments(["--shape=tiny", "--gpus=2", "--pp=2"])
    make_model(tmp_path / "model", args)
    ranks = run_on_ranks(turns, (update_job(tmp_path / "model", args), 2), args.gpus, timeout_s=100)
    assert [(len(rank.out_s), len(rank.back_s)) for rank in ranks] == [(2, 2)] * 2
    # A layer of the tiny shape has 147,776 parameters, and both stages hold its 131,072 embeddings; 2 + 12 bytes each.
    assert [rank.num_bytes for rank in ranks] == pytest.approx([(147_776 + 131_072) * 14] * 2, rel=0.01)
    assert summary(ranks)["share of pinned copies"] > 0
