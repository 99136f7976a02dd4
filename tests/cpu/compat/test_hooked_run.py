"""A run with the hooks of 0.4: which rows it checks, what a trainer's hook sees, and what it logs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.generators.types import GeneratorInterface
from skyrl_train.compat.run import HookedRun, Reports
from skyrl_train.compat.trainer import RayPPOTrainer
from skyrl_train.config import load_config
from skyrl_train.rollout.collect import Collector
from skyrl_train.types import Generation, Group
from tests.support.hydra_main import composed
from tests.support.samples import sample
from tests.support.scripted import prompt


@pytest.mark.parametrize(
    ("base", "method", "is_checked"),
    [
        (SkyRLGymGenerator, "mine", True),
        (SkyRLGymGenerator, "agent_loop", True),
        (SkyRLGymGenerator, "generate", False),
        (GeneratorInterface, "generate", False),
    ],
)
def test_the_environments_of_rows_are_checked_where_the_generator_plays_them(base: type, method: str, is_checked: bool):
    run: Any = HookedRun.__new__(HookedRun)
    kind = type("Own", (base,), {method: print})
    run._old = SimpleNamespace(generator=kind.__new__(kind))
    run.config, run.train_prompts, run.val_prompts = load_config([]), [prompt("null")], []
    if is_checked:
        with pytest.raises(ValueError, match="null"):
            run._check_environments()
    else:
        run._check_environments()


@pytest.mark.parametrize(("max_turns", "rewards"), [(1, [0.5, 0.0]), (2, [[0.0, 0.5], [0.0, 0.0]])])
def test_the_hook_gets_zeroed_rewards_of_one_kind_and_no_groups_without_signal(max_turns: int, rewards: list[Any]):
    class Inner(Collector):
        def __init__(self) -> None:
            """No engines."""

        async def collect(self, *arguments: Any, **named: Any) -> list[Group]:
            made = sample([1], Generation([4, 5], [-0.5, -0.5], "", "stop", 0), 0.5)
            unfinished = replace(made, stop_reason="length")
            groups = (made, unfinished), (made, made)
            return [Group(prompt("mine"), samples) for samples in groups]

    def hook(output: Any, uids: list[str]) -> Any:
        seen.append(output["rewards"])
        return output

    seen = list[Any]()
    run: Any = HookedRun.__new__(HookedRun)
    run.config = load_config([f"generator.max_turns={max_turns}", "trainer.algorithm.dynamic_sampling.type=filter"])
    run._old = SimpleNamespace(postprocess_generator_output=hook, all_metrics={}, all_timings={})
    run._reported = Reports()
    run._hooks = SimpleNamespace(cfg=composed("generator.zero_reward_on_non_stop=true"))
    asyncio.run(run._postprocessed(Inner()).collect())
    assert seen == [rewards]


def test_evaluations_zero_rewards_also_where_the_hook_of_training_gets_zeroed_ones():
    run: Any = HookedRun.__new__(HookedRun)
    run.config, run._console, run.val_prompts = load_config([]), Console(quiet=True), []
    run._hooks = SimpleNamespace(cfg=composed("generator.zero_reward_on_non_stop=true"))
    collector, samples = object.__new__(Collector), SimpleNamespace(evaluation=print)
    assert run.get_evaluation(collector, samples).zeroes_unfinished


class Own(RayPPOTrainer):
    def postprocess_generator_output(self, generator_output: Any, uids: list[str]) -> Any:
        size = len(uids)
        self.all_metrics |= {"size": size, "numpy": np.float32(size), "tensor": torch.tensor([size]), "text": "none"}
        if size == 1:
            self.all_metrics["rare"] = np.array(3)
        self.all_timings["hook"] = 0.25
        return generator_output


def test_metrics_of_all_groups_are_averaged_and_timings_added_up():
    run: Any = HookedRun.__new__(HookedRun)
    run._old, run._reported = Own(composed(), None, None, None, None, None), Reports()
    for uids in (["1"], ["2", "2"]):
        assert run._postprocess({"rewards": []}, uids) == {"rewards": []}
    run._old.all_metrics["after"] = True
    expected = {"size": 1.5, "numpy": 1.5, "tensor": 1.5, "rare": 3.0, "after": 1.0, "timing/hook": 0.5}
    assert run._own_metrics() == expected
    assert run._own_metrics() == {} and run._old.all_timings == {}


def test_vectors_are_no_metrics():
    reports = Reports()
    reports.add({"vector": torch.ones(2), "number": np.int64(2), "unknown": None})
    assert reports.take() == {"number": 2.0}
