"""One rank of step.py's comparison of methods: the update of each objective, in turns with that of `regular`.

Each pair is measured one right after the other, so a machine that slows down slows both. On a CPU, where a rank has one
thread, its own processor seconds are measured: other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.lib.update_ranks import Job, build, experience, timed
from skyrl_train.algorithms.build import build_objective
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.algorithms.selection import MiniBatch, selected
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, LOSSES
from skyrl_train.config import load_config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.device import device
from skyrl_train.ranks import Rendezvous
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.types import ExperienceBatch, TrainBatch

REGULAR = "regular"
OBJECTIVE_REPEATS = 50


@dataclass(frozen=True)
class Comparison:
    job: Job
    objectives: Mapping[str, Objective]
    """Name -> objective, `regular` first."""
    estimators: Mapping[str, AlgorithmConfig]


def comparison(job: Job) -> Comparison:
    """Every loss, correction and estimator but those that need another model or fine-tuning's data."""
    key = "trainer.algorithm"
    found = {REGULAR: f"policy_loss_type={REGULAR}"}
    found |= {name: f"policy_loss_type={name}" for name in LOSSES if name != "cross_entropy"}
    found |= {name: f"corrections=[{name}]" for name in CORRECTIONS}
    algorithms = {name: _algorithm(f"{key}.{value}") for name, value in found.items()}
    return Comparison(
        job,
        {name: build_objective(algorithm.values, 1.0) for name, algorithm in algorithms.items()},
        {name: _algorithm(f"{key}.advantage_estimator={name}") for name in ADVANTAGES if name != "gae"},
    )


def _algorithm(override: str) -> AlgorithmConfig:
    return load_config([override, "trainer.algorithm.use_kl_loss=false"]).trainer.algorithm


def run(rendezvous: Rendezvous, given: Comparison) -> dict[str, Any]:
    """Seconds of an update of `regular`; method -> ratio to it in each round, and seconds of its objective alone;
    estimator -> seconds of a batch."""
    job = given.job
    policy, batch = build(rendezvous, job)
    signals: dict[str, dict[str, Any]] = {name: _selected(each, batch) for name, each in given.objectives.items()}

    def update(name: str) -> float:
        return _seconds(lambda: policy.update(batch, objective=given.objectives[name], **signals[name]))

    ratios: dict[str, list[float]] = {name: [] for name in given.objectives}
    regular: list[float] = []
    for number in range(job.warm_up + job.steps):
        for name in given.objectives:
            # Neither of a pair is always the second, for which caches are warm.
            own, base = _pair(lambda name=name: update(name), lambda: update(REGULAR), swapped=number % 2 == 1)  # type: ignore[misc]
            if number >= job.warm_up:
                regular.append(base)
                ratios[name].append(own / base)
    vocab_size = int(policy.model.bridge.hf_config.vocab_size)
    return {
        "regular_s": statistics.median(regular),
        "ratios": ratios,
        "objective_s": {name: _objective_seconds(given.objectives[name], batch, signals[name]) for name in ratios},
        "credit_s": dict(_credit_seconds(given.estimators, experience(job, vocab_size))),
    }


def _pair(first: Callable[[], float], second: Callable[[], float], *, swapped: bool) -> tuple[float, float]:
    if not swapped:
        return first(), second()
    later = second()
    return first(), later


def _seconds(work: Callable[[], object]) -> float:
    if device().type == "cuda":
        return timed(work)
    started = time.process_time()
    work()
    return time.process_time() - started


def _selected(objective: Objective, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """What the driver selects before the update, which is not a part of it."""
    size, draw = len(batch.token_ids), torch.Generator().manual_seed(3)
    signals = {name: -torch.rand(size, generator=draw) for name in objective.selection_needs}
    advantages = batch.signals["advantages"]
    return selected(
        objective.selections, MiniBatch(batch.token_ids, batch.cu_seqlens, batch.loss_mask, advantages, signals)
    )


def _objective_seconds(objective: Objective, batch: TrainBatch, chosen: Mapping[str, torch.Tensor]) -> float:
    """Seconds of the objective and its gradient on given logprobs: without the model, and so without its noise."""
    sample = torch.repeat_interleave(batch.cu_seqlens.diff().long())
    old = batch.signals["rollout_logprobs"] + 0.1
    signals = {**batch.signals, **chosen, "old_logprobs": old}
    if "entropy" in objective.needs:
        signals["entropy"] = -old
    signals = {name: values.to(device()) for name, values in signals.items()}
    mask, weights = batch.loss_mask.to(device()), {k: v.to(device()) for k, v in batch.loss_weights.items()}
    per_sample = PerSample(sample.to(device()), len(batch.sample_ids), mask)

    def work() -> None:
        logprobs = signals["old_logprobs"].clone().requires_grad_()
        loss, _ = objective_loss(objective, TokenInputs(logprobs, mask, per_sample, signals), weights)
        loss.backward()

    return statistics.median(_seconds(work) for _ in range(OBJECTIVE_REPEATS))


def _credit_seconds(estimators: Mapping[str, AlgorithmConfig], batch: ExperienceBatch) -> Iterator[tuple[str, float]]:
    """Seconds of the driver for the credit of a batch with two named rewards and a greedy baseline."""
    draw = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 2, (batch.num_samples,), generator=draw).double()
    rewards = torch.zeros_like(batch.rewards)
    rewards[batch.cu_seqlens[1:].long() - 1] = scores
    named = {"a": scores, "b": torch.rand(len(scores), generator=draw, dtype=torch.float64)}
    batch = replace(batch, rewards=rewards, named_rewards=named, baselines=torch.zeros_like(scores))
    for name, algorithm in estimators.items():
        assign = CreditAssignment(algorithm)
        yield name, statistics.median(_seconds(lambda assign=assign: assign(batch)) for _ in range(5))  # type: ignore[misc]
