"""Learning rates, FLOPs and Adam."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from skyrl_train.config.policy import OptimizerConfig
from skyrl_train.hf.flops import model_cost
from skyrl_train.megatron.optimizer.adam import FusedAdam
from skyrl_train.megatron.optimizer.optimizer import learning_rate
from skyrl_train.megatron.verify.layout_check import OPTIMIZER
from tests.support.families import FAMILIES, VOCABULARY, write_family

RISING: OptimizerConfig = replace(OPTIMIZER, lr=1.0, num_warmup_steps=2, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant_with_warmup", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28]),
        ("cosine", [0.5, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * fifth / 5)) for fifth in range(5))]),
    ],
)
def test_the_learning_rate_rises_and_falls(scheduler: str, expected: list[float]):
    config = replace(RISING, scheduler=scheduler)
    assert [learning_rate(step, 7, config) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_without_warm_up_the_schedules_are_those_of_transformers(scheduler: str):
    """The last step has a rate above 0."""
    config = replace(RISING, num_warmup_steps=0, min_lr_ratio=0.0, scheduler=scheduler)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = transformers.get_scheduler(scheduler, optimizer, num_warmup_steps=0, num_training_steps=5)
    for step in range(5):
        rate = learning_rate(step, 5, config)
        assert rate == pytest.approx(theirs.get_last_lr()[0]) and rate > 0
        optimizer.step()
        theirs.step()


def test_without_warm_up_the_first_step_has_the_whole_rate():
    assert learning_rate(0, 10, replace(RISING, num_warmup_steps=0, scheduler="cosine")) == 1.0


def test_a_run_of_nothing_but_warm_up_never_divides_by_zero():
    assert learning_rate(2, 2, replace(RISING, scheduler="linear")) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3_tied", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]
)
def test_flops_are_those_counted_in_hugging_faces_model(name: str, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_family(name, tmp_path), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None] % VOCABULARY)
    cost = model_cost(model.config)
    # Eager attention computes the whole square.
    assert 2 * cost.matrix_weights * length + 2 * cost.attention_width * length**2 == pytest.approx(
        counter.get_total_flops(), rel=2e-3
    )
    lengths = torch.tensor([length, 2 * length])
    assert cost.train_flops(lengths) == pytest.approx(
        6 * cost.matrix_weights * 3 * length + 3 * cost.attention_width * 5 * length**2
    )
    assert name in FAMILIES


def test_adam_takes_the_steps_of_torchs_adamw():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator)]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
    ours = FusedAdam([{"params": mine[:1], "weight_decay": 0.1}, {"params": mine[1:]}], **settings)
    torchs = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}], **settings
    )
    for step in range(5):
        for group, other in zip(ours.param_groups, torchs.param_groups, strict=True):
            group["lr"] = other["lr"] = 1e-2 / (step + 1)
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_adam_keeps_two_moments_per_parameter_and_one_step_per_group():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    adam = FusedAdam([used, unused], lr=0.1)
    used.grad = torch.ones(2)
    adam.step()
    assert sorted(adam.state[used]) == ["exp_avg", "exp_avg_sq"]
    assert adam.param_groups[0]["step"] == 1
    assert not adam.state[unused] and torch.equal(unused, torch.ones(2))
