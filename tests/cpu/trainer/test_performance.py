"""Throughput of generation."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.rollout.shaping import copies
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.performance import rollout_performance
from skyrl_train.types import Group, Prompt, Sample, final_reward


def test_copies_of_a_group_were_generated_once():
    sample = Sample(torch.arange(4), torch.arange(4) > 0, torch.zeros(4), 1, final_reward(4, 1.0), "stop", 1, 0)
    groups = [Group(Prompt("0", [], "addition", {}, "sums"), (sample,))]
    timers = Timers()
    timers.add("generate", 0.5)
    metrics = rollout_performance(groups + copies(groups, 3, run_seed=0), timers)
    assert metrics["perf/generate_tokens_per_s"] == pytest.approx(3 / 0.5)
