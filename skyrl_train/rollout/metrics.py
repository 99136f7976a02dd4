"""Metrics of groups; names and meanings are those of skyrl_train 0.4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from skyrl_train.envs.registry import aggregate_env_metrics
from skyrl_train.rollout.pass_at_k import estimate, pass_rates
from skyrl_train.types import Group, Metrics, Sample


def rollout_metrics(groups: Sequence[Group], pass_threshold: float = 0.0) -> Metrics:
    """`generate/*`, `reward/*` and `environment/*` of the samples of one step.

    Args: pass_threshold: a sample passes if its reward is above it.

    Lengths count the tokens that the policy wrote, over all turns. Averages by reward are 0 without such samples;
    "non_zero" means a positive reward.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = _rewards(samples)
    # A sample that is not trained (generator.apply_overlong_filtering) counts all tokens after its prompt.
    num_tokens = np.array(
        [int(sample.loss_mask.sum()) or len(sample.token_ids) - sample.prompt_length for sample in samples]
    )
    passed: dict[int, list[bool]] = defaultdict(list)
    for group in groups:
        passed[len(group.samples)].append(any(sample.reward > pass_threshold for sample in group.samples))
    return {
        "generate/batch_num_seq": float(len(samples)),
        "generate/min_num_tokens": float(num_tokens.min()),
        "generate/max_num_tokens": float(num_tokens.max()),
        "generate/avg_num_tokens": float(num_tokens.mean()),
        "generate/std_num_tokens": float(num_tokens.std()),
        "generate/avg_tokens_non_zero_rewards": _mean_or_zero(num_tokens[rewards > 0]),
        "generate/avg_tokens_zero_rewards": _mean_or_zero(num_tokens[rewards == 0]),
        "generate/share_stopped_by_length": float(np.mean([sample.stop_reason == "length" for sample in samples])),
        "generate/avg_turns": float(np.mean([sample.turns for sample in samples])),
        "reward/avg_raw_reward": float(rewards.mean()),
        "reward/mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
        **{f"reward/avg_pass_at_{size}": float(np.mean(passed[size])) for size in sorted(passed)},
        **_named_rewards(samples),
        **_env_metrics(groups),
    }


def evaluation_metrics(groups: Sequence[Group], pass_threshold: float = 0.0) -> Metrics:
    """Scores and metrics of environments as `eval/all/...` and for each data source.

    `avg_score` and `mean_positive_reward` are means over samples, `pass_at_{k}` are the estimates of pass_at_k.py, and
    `..._stderr` standard errors over the prompts (of the means of their samples, for `avg_score`).
    Args: pass_threshold: a sample passes if its reward is above it.
    """
    if not groups:  # all of them failed
        return {}
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    named = [("all", groups), *((source.replace("/", "_"), of_source) for source, of_source in by_source.items())]
    return {
        f"eval/{name}/{key}": value
        for name, some in named
        for key, value in (_scores(some, pass_threshold) | _env_metrics(some)).items()
    }


def _scores(groups: Sequence[Group], pass_threshold: float) -> Metrics:
    rewards = _rewards([sample for group in groups for sample in group.samples])
    rates = pass_rates([[sample.reward > pass_threshold for sample in group.samples] for group in groups])
    estimates = {"avg_score": estimate([fmean(sample.reward for sample in group.samples) for group in groups])}
    estimates |= {f"pass_at_{k}": rate for k, rate in rates.items()}
    errors = {name: each.standard_error for name, each in estimates.items()}
    return {
        **{name: each.value for name, each in estimates.items()},
        "avg_score": float(rewards.mean()),  # over samples: groups with failed rollouts have fewer
        "mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
        **{f"{name}_stderr": error for name, error in errors.items() if error is not None},
    }


def _named_rewards(samples: Sequence[Sample]) -> Metrics:
    """`reward/named/NAME`: mean over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.named_rewards.items():
            values[name].append(value)
    return {f"reward/named/{name}": float(np.mean(some)) for name, some in values.items()}


def _rewards(samples: Sequence[Sample]) -> np.ndarray:
    """[B] float64"""
    return np.array([sample.reward for sample in samples], dtype=np.float64)


def _env_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of environments as `environment/{key}`, or `environment/{env_class}/{key}` if several classes have the
    same key.
    """
    by_class: dict[str, list[dict[str, object]]] = defaultdict(list)
    for group in groups:
        by_class[group.prompt.env_class] += [sample.env_metrics for sample in group.samples if sample.env_metrics]
    aggregated = {name: aggregate_env_metrics(name, metrics) for name, metrics in by_class.items() if metrics}
    keys = [key for metrics in aggregated.values() for key in metrics]
    return {
        f"environment/{key}" if keys.count(key) == 1 else f"environment/{name}/{key}": float(value)
        for name, metrics in aggregated.items()
        for key, value in metrics.items()
        if isinstance(value, (int, float))
    }


def _mean_or_zero(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
