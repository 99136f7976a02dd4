"""Profiles that would never be written are refused."""

from __future__ import annotations

import pytest

from skyrl_train.checks.profiler import profiler_problems, restart_problems
from skyrl_train.config import load_config

PROFILER = "trainer.policy.megatron_config.torch_profiler_config"


def problems(*overrides: str, restarts: bool = False) -> list[str]:
    megatron = load_config([f"{PROFILER}.{one}" for one in overrides]).trainer.policy.megatron_config
    return list(restart_problems(megatron, "P") if restarts else profiler_problems(megatron, "P", 2))


@pytest.mark.parametrize("key", ["enable", "record_memory"])
def test_ranks_that_there_are_not_are_refused(key: str):
    assert problems(f"{key}=true", "ranks=[0,7]") == []
    assert problems("ranks=[7]") == []
    (found,) = problems(f"{key}=true", "ranks=[7]")
    assert "ranks is [7]: nothing would be traced, name ranks from 0 to 1" in found


def test_without_steps_only_what_runs_out_of_memory_can_be_written():
    assert problems("record_memory=true", "steps=[]") == []
    assert "steps is empty" in problems("enable=true", "steps=[]")[0]


@pytest.mark.parametrize("key", ["enable", "record_memory"])
def test_processes_that_end_with_each_step_are_not_profiled(key: str):
    assert problems(restarts=True) == []
    (found,) = problems(f"{key}=true", restarts=True)
    assert f"torch_profiler_config.{key} is true and trainer.placement.release exit" in found
