"""Metrics of groups; names and meanings are those of skyrl_train 0.4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import count
from statistics import fmean

import numpy as np

from skyrl_train.envs.registry import aggregate_env_metrics
from skyrl_train.rollout.pass_at_k import estimate, pass_rates
from skyrl_train.types import Group, Metrics, Sample


def rollout_metrics(groups: Sequence[Group], pass_threshold: float = 0.0) -> Metrics:
    """`generate/*`, `reward/*` and `environment/*` of the samples of one step.

    Args: pass_threshold: a sample passes if its reward is above it.

    A conversation that is trained as several samples counts once in all but `batch_num_seq` and `environment/*`, which
    counts every sample that has `env_metrics`. Lengths count the tokens that the policy wrote, over all turns.
    """
    conversations = [conversation for group in groups for conversation in group.conversations]
    rewards = _rewards(groups)
    num_tokens = np.array([sum(sample.num_written for sample in conversation) for conversation in conversations])
    passed: dict[int, list[bool]] = defaultdict(list)
    for group in groups:
        passed[len(group.rewards)].append(any(reward > pass_threshold for reward in group.rewards))
    cut_off = [samples[-1].stop_reason == "length" for samples in conversations]
    return {
        "generate/batch_num_seq": float(sum(map(len, conversations))),
        **length_metrics(num_tokens, rewards),
        "generate/share_stopped_by_length": float(np.mean(cut_off)),
        "generate/avg_turns": float(np.mean([sum(sample.turns for sample in samples) for samples in conversations])),
        "reward/avg_raw_reward": float(rewards.mean()),
        "reward/mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
        **{f"reward/avg_pass_at_{size}": float(np.mean(passed[size])) for size in sorted(passed)},
        **_named_rewards(conversations),
        **_env_metrics(groups),
    }


def length_metrics(num_tokens: np.ndarray, rewards: np.ndarray) -> Metrics:
    """`generate/*` of response lengths. Averages by reward are 0 without such responses; "non_zero" is positive."""

    def mean_of(chosen: np.ndarray) -> float:
        return float(num_tokens[chosen].mean()) if chosen.any() else 0.0

    return {
        "generate/min_num_tokens": float(num_tokens.min()),
        "generate/max_num_tokens": float(num_tokens.max()),
        "generate/avg_num_tokens": float(num_tokens.mean()),
        "generate/std_num_tokens": float(num_tokens.std()),
        "generate/avg_tokens_non_zero_rewards": mean_of(rewards > 0),
        "generate/avg_tokens_zero_rewards": mean_of(rewards == 0),
    }


def evaluation_metrics(groups: Sequence[Group], pass_threshold: float = 0.0) -> Metrics:
    """Scores and metrics of environments as `eval/all/...` and for each data source.

    `avg_score` and `mean_positive_reward` are means over conversations, `pass_at_{k}` are the estimates of
    pass_at_k.py, and `..._stderr` standard errors over the prompts (of the means of their samples, for `avg_score`).
    Args: pass_threshold: a sample passes if its reward is above it.
    """
    if not groups:  # all of them failed
        return {}
    by_source: dict[str, list[Group]] = defaultdict(list)
    names = _metric_names({group.prompt.data_source for group in groups})
    for group in groups:
        by_source[names[group.prompt.data_source]].append(group)
    named = {**by_source, "all": groups}  # also if a source has that name
    return {
        f"eval/{name}/{key}": value
        for name, some in named.items()
        for key, value in (_scores(some, pass_threshold) | _env_metrics(some)).items()
    }


def _metric_names(sources: Set[str]) -> dict[str, str]:
    """Name of each data source in metrics: with `_` in place of `/`, or more of them where another source has it."""
    names: dict[str, str] = {}
    for source in sorted(sources, key=lambda source: ("/" in source, source)):
        choices = (source.replace("/", "_" * width) for width in count(1))
        names[source] = next(name for name in choices if name not in names.values())
    return names


def _scores(groups: Sequence[Group], pass_threshold: float) -> Metrics:
    rewards = _rewards(groups)
    rates = pass_rates([[reward > pass_threshold for reward in group.rewards] for group in groups])
    estimates = {"avg_score": estimate([fmean(group.rewards) for group in groups])}
    estimates |= {f"pass_at_{k}": rate for k, rate in rates.items()}
    errors = {name: each.standard_error for name, each in estimates.items()}
    return {
        **{name: each.value for name, each in estimates.items()},
        "avg_score": float(rewards.mean()),  # over samples: groups with failed rollouts have fewer
        "mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
        **{f"{name}_stderr": error for name, error in errors.items() if error is not None},
    }


def _named_rewards(conversations: Sequence[Sequence[Sample]]) -> Metrics:
    """`reward/named/NAME`: mean over the conversations that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for samples in conversations:
        for name in dict.fromkeys(name for sample in samples for name in sample.named_rewards):
            values[name].append(sum(sample.named_rewards.get(name, 0.0) for sample in samples))
    return {f"reward/named/{name}": float(np.mean(some)) for name, some in values.items()}


def _rewards(groups: Sequence[Group]) -> np.ndarray:
    """[conversations] float64"""
    return np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)


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
    }
