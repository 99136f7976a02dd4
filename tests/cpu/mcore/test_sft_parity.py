"""Fine-tuning computes what a plain loop of transformers (and PEFT) computes, and means are over all tokens."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from skyrl_train.algorithms.objective import Objective, cross_entropy_objective
from skyrl_train.batching.build import build_examples
from skyrl_train.batching.split import split
from skyrl_train.config.policy import LoraConfig, OptimizerConfig
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import Layout, Trial, rules, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.trainer.sft import update_metrics
from skyrl_train.types import Example, TrainBatch
from tests.support.adapters import peft_model, write_adapter
from tests.support.families import VOCABULARY, make_trial, without_kl, write_family
from tests.support.layouts import layout

pytestmark = pytest.mark.slow
NUM_STEPS, WARMUP = 25, 5
ADAM = OptimizerConfig(
    lr=2e-3,
    adam_betas=(0.9, 0.95),
    adam_eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=0.5,
    scheduler="cosine",
    num_warmup_steps=WARMUP,
    min_lr_ratio=0.1,
)
Batches = list[list[Example]]


@dataclass(frozen=True)
class Curve:
    """What one loop logged."""

    losses: list[float]
    """Before each update."""
    norms: list[float]
    """Of the gradient, before clipping."""
    held_out: float
    """After the last update."""
    learnt: float = math.nan
    """By how much the held-out loss fell; only of the plain loop."""


def counting(generator: torch.Generator, length: int, prompt: int) -> Example:
    """A sequence that counts up by 1 to 3, so that there is something to learn; `prompt` tokens are not trained."""
    first, step = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, VOCABULARY), (1, 4)))
    ids = (first + step * torch.arange(length)) % VOCABULARY
    mask = torch.arange(length) >= prompt
    if length > 12:
        mask[length // 2 : length // 2 + 3] = False  # as a user's turn between two of the assistant's
    return Example(ids, mask)


@functools.cache
def batches() -> tuple[Batches, list[Example]]:
    """Training batches of 8 rows of 4 to 40 tokens, and 12 held-out rows."""
    generator = torch.Generator().manual_seed(3)

    def row() -> Example:
        length = int(torch.randint(4, 41, (), generator=generator))
        return counting(generator, length, prompt=int(torch.randint(1, length, (), generator=generator)))

    return [[row() for _ in range(8)] for _ in range(NUM_STEPS)], [row() for _ in range(12)]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def model() -> Path:
    return write_family("qwen3_tied", Path(_folder().name, "model"))


def padded(examples: list[Example]) -> dict[str, torch.Tensor]:
    """As a collator of transformers makes it: right padding, label -100 where nothing is trained."""
    width = max(len(example.token_ids) for example in examples)
    ids, labels = torch.zeros(len(examples), width, dtype=torch.int64), torch.full((len(examples), width), -100)
    attention = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        ids[row, :length], attention[row, :length] = example.token_ids, 1
        labels[row, :length] = torch.where(example.loss_mask, example.token_ids, -100)
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def cosine(step: int) -> float:
    """Share of the learning rate, from the schedule's definition."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    falling = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (NUM_STEPS - WARMUP)))
    return 0.1 + 0.9 * falling


@functools.cache
def adapter() -> LoraConfig:
    """A random one to start from, so that A has a gradient from the first step."""
    return write_adapter(Path(_folder().name, "adapter"), model())


@functools.cache
def plain_loop(lora: bool) -> Curve:
    """transformers' own loss, PEFT's own adapters, torch's own AdamW, clipping and schedule."""
    train, held_out = batches()
    if lora:
        net = peft_model(model(), adapter().path or "")
    else:
        net = transformers.AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32)
    trained = [p for p in net.parameters() if p.requires_grad]
    matrices, norms = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    losses, sizes = [], []
    with torch.no_grad():
        untrained = net(**padded(held_out)).loss.item()
    for examples in train:
        loss = net(**padded(examples)).loss
        loss.backward()
        sizes.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        after = net(**padded(held_out)).loss.item()
    return Curve(losses, sizes, after, untrained - after)


def policy_of(rendezvous: Rendezvous, one: Layout, objective: Objective, lora: bool = False) -> MegatronPolicy:
    return MegatronPolicy(
        rendezvous,
        str(model()),
        one.megatron,
        ADAM,
        objective,
        bf16=False,
        seed=1,
        num_optimizer_steps=NUM_STEPS,
        lora=adapter() if lora else None,
    )


def _fine_tune(rendezvous: Rendezvous, arguments: tuple[Layout, bool]) -> dict[str, Any]:
    """What the trainer's step does, on this rank."""
    one, lora = arguments
    policy = policy_of(rendezvous, one, cross_entropy_objective(), lora)

    def shard(examples: list[Example]) -> TrainBatch:
        return split(build_examples(examples), rules(one, policy.ranks.dp_size))[policy.ranks.dp_rank]

    train, held_out = batches()
    reports = [(policy.update(shard(examples)), examples) for examples in train]
    return {
        "metrics": [update_metrics(report.metrics, examples) for report, examples in reports if report.metrics],
        "held_out": policy.evaluate(shard(held_out)),
    }


@functools.cache
def megatron_loop(processes: int, sizes: tuple[tuple[str, Any], ...], lora: bool) -> Curve:
    if lora:
        adapter()  # made before the ranks are
    parts = run_on_ranks(_fine_tune, (layout(processes, dict(sizes)), lora), processes, timeout_s=200)
    metrics = next(part["metrics"] for part in parts if part["metrics"])
    return Curve(
        [row["sft/loss"] for row in metrics],
        [row["policy/grad_norm"] for row in metrics],
        sum(part["held_out"] for part in parts if part["held_out"] is not None),
    )


LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "DP2": (2, {}),
    "CP2": (2, {"cp": 2}),
}


CASES = [(name, False) for name in LAYOUTS] + [(name, True) for name in ("one rank", "TP2", "PP2")]


@pytest.mark.parametrize(("name", "lora"), CASES, ids=[f"{name}{' LoRA' * lora}" for name, lora in CASES])
def test_the_loss_curve_of_25_steps_is_that_of_a_plain_loop_of_transformers_and_peft(name: str, lora: bool):
    processes, sizes = LAYOUTS[name]
    expected, curve = plain_loop(lora), megatron_loop(processes, tuple(sizes.items()), lora)
    assert len(curve.losses) == NUM_STEPS and expected.learnt > (0.01 if lora else 0.3), "it learns"
    assert max(expected.norms) > 0.5, "clipping is at work"
    assert curve.losses == pytest.approx(expected.losses, abs=1e-4)
    assert curve.norms == pytest.approx(expected.norms, rel=1e-3)
    assert curve.held_out == pytest.approx(expected.held_out, abs=1e-4)


def test_two_ranks_with_uneven_token_counts_log_the_loss_of_one():
    """Closer than to another program: the same code, cut differently."""
    train, _ = batches()
    one, _ = LAYOUTS["DP2"]
    shares = [
        [float(shard.loss_mask.sum()) for shard in split(build_examples(e), rules(layout(one, {}), 2))] for e in train
    ]
    assert sum(max(pair) > 1.2 * min(pair) for pair in shares) > NUM_STEPS // 2, "token counts are uneven"
    alone, both = megatron_loop(1, (), False), megatron_loop(2, (), False)
    assert both.losses == pytest.approx(alone.losses, abs=2e-5)
    assert both.held_out == pytest.approx(alone.held_out, abs=2e-5)


def _reinforce(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, Any]:
    """One update of reinforcement learning; also this rank's own tokens and mean loss."""
    trial, one = arguments
    policy = policy_of(rendezvous, one, trial.objective)
    batch = share_of(trial, one, policy.ranks, num_mini_batches=2)
    policy.keep_old_logprobs(batch)
    return {"metrics": policy.update(batch).metrics, "tokens": int(batch.loss_mask.sum())}


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean"])
def test_two_ranks_with_uneven_token_counts_log_the_metrics_of_one_in_reinforcement_learning(reduction: str):
    trial = make_trial(model(), [40, 3, 5, 4, 40, 6, 7, 3])
    mask = trial.experience.loss_mask.clone()
    mask[:30] = False  # of the two long samples, one has a long prompt
    experience = replace(trial.experience, loss_mask=mask)
    terms = tuple(replace(term, reduction=reduction) for term in without_kl(trial.objective).terms)
    trial = replace(trial, objective=replace(trial.objective, terms=terms), experience=experience)
    (alone,) = run_on_ranks(_reinforce, (trial, layout(1, {})), 1, timeout_s=120)
    both = run_on_ranks(_reinforce, (trial, layout(2, {})), 2, timeout_s=120)
    counts = [part["tokens"] for part in both]
    assert sum(counts) == alone["tokens"] and max(counts) > 1.2 * min(counts), "token counts are uneven"
    assert alone["metrics"]["policy/policy_loss"] != 0
    for part in both:
        assert part["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)
