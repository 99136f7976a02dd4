"""Traces of chosen ranks and steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.policy import TorchProfilerConfig
from skyrl_train.megatron.passes.profiling import Tracer
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout


def _train_two_steps(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> None:
    trial, one = arguments
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, OPTIMIZER, objective, bf16=False, seed=1, num_optimizer_steps=2
    )
    batch = share_of(trial, one, policy.ranks)
    for _ in range(2):
        policy.keep_old_logprobs(batch)
        policy.update(batch)


def names_in(trace: Path) -> set[Any]:
    return {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_the_chosen_step_of_the_chosen_rank_is_traced_phase_by_phase(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path / "model"))
    traces = tmp_path / "traces"
    profiler = TorchProfilerConfig(enable=True, record_memory=False, ranks=(1,), steps=(2,), save_path=str(traces))
    run_on_ranks(_train_two_steps, (trial, layout(2, {"pp": 2}, torch_profiler_config=profiler)), 2, timeout_s=120)
    files = {file.name: file for file in traces.iterdir()}
    assert set(files) == {"policy-1_step2_old_logprobs.json.gz", "policy-1_step2_update.json.gz"}
    update = names_in(files["policy-1_step2_update.json.gz"])
    assert {"update", "pack", "forward_backward", "optimizer", "aten::mm"} <= update
    assert "optimizer" not in names_in(files["policy-1_step2_old_logprobs.json.gz"])


@pytest.mark.parametrize(("enable", "rank"), [(False, 0), (True, 1)])
def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path, enable: bool, rank: int):
    config = TorchProfilerConfig(
        enable=enable, record_memory=False, ranks=(0,), steps=(1,), save_path=str(tmp_path / "traces")
    )
    with Tracer(config, "policy", rank)("update"):
        pass
    assert not (tmp_path / "traces").exists()
