"""Metrics of groups; names and meanings are those of skyrl_train 0.4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from skyrl_train.envs.registry import aggregate_env_metrics
from skyrl_train.types import Group, Metrics, Sample


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """`generate/*`, `reward/*` and `environment/*` of the samples of one step.

    Lengths count the tokens that the policy wrote, over all turns. Averages by reward are 0 without such samples;
    "non_zero" means a positive reward.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = _rewards(samples)
    # A sample that is not trained (generator.apply_overlong_filtering) counts all tokens after its prompt.
    num_tokens = np.array(
        [int(sample.loss_mask.sum()) or len(sample.token_ids) - sample.prompt_length for sample in samples]
    )
    scores = _scores(groups)
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
        "reward/avg_raw_reward": scores["avg_score"],
        "reward/mean_positive_reward": scores["mean_positive_reward"],
        **{f"reward/avg_{name}": value for name, value in scores.items() if name.startswith("pass_at_")},
        **_named_rewards(samples),
        **_env_metrics(groups),
    }


def evaluation_metrics(groups: Sequence[Group]) -> Metrics:
    """`avg_score`, `pass_at_{n}` and `mean_positive_reward` as `eval/all/...` and for each data source.

    `pass_at_{n}` is a mean over the groups of n samples, for each n that occurs; the others are means over samples.
    """
    if not groups:  # all of them failed
        return {}
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group)
    named = [("all", groups), *((source.replace("/", "_"), of_source) for source, of_source in by_source.items())]
    return {f"eval/{name}/{key}": value for name, some in named for key, value in _scores(some).items()}


def _scores(groups: Sequence[Group]) -> Metrics:
    rewards = _rewards([sample for group in groups for sample in group.samples])
    passed: dict[int, list[bool]] = defaultdict(list)
    for group in groups:
        passed[len(group.samples)].append(any(sample.reward > 0 for sample in group.samples))
    return {
        "avg_score": float(rewards.mean()),
        **{f"pass_at_{size}": float(np.mean(passed[size])) for size in sorted(passed)},
        "mean_positive_reward": float(np.maximum(rewards, 0.0).mean()),
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
    same key."""
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
