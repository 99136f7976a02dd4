"""Tokens sampled by older weights: interpolated old logprobs (prox_logp_method=loglinear) and metrics by staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce


def loglinear(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor, num_steps: int) -> Tensor:
    """Old logprobs [P], interpolated by policy versions between the engine's and the current ones.

    A token of staleness d was sampled d versions before the step, and the current policy is m = num_steps optimizer
    steps, which are versions too, after the step began: old = rollout + d / (d + m) * (logprobs - rollout). With m = 0
    the current policy is the old one; a token of the newest weights, or of unknown ones, has its engine's logprob.

    Args: logprobs, rollout_logprobs [P], of the current policy, without gradient, and of the engine; staleness [P],
        -1 where unknown. Source: AReaL, `prox_logp_method=loglinear`, which counts m = 1 in all mini-batches.
    """
    if num_steps == 0:
        return logprobs
    behind = staleness.clamp(min=0).to(logprobs.dtype)
    between = rollout_logprobs + behind / (behind + num_steps) * (logprobs - rollout_logprobs)
    return torch.where(behind > 0, between, rollout_logprobs)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Tokens by the steps between their sampling and their update: 0, 1, ..., and at least `last`."""

    last: int
    versions_per_step: int
    """Number of optimizer steps, and so of policy versions, per step."""

    def of(self, staleness: Tensor) -> Tensor:
        """[P] policy versions -> [P] buckets; -1 where unknown. A part of a step counts as a step."""
        steps = (staleness + self.versions_per_step - 1) // self.versions_per_step
        return torch.where(staleness < 0, -1, steps.clamp(max=self.last))


SPLIT = (
    "_ratio",
    "rollout_train_kl",
    "rollout_train_kl_k1",
    "rollout_train_ratio_mean",
    "rollout_train_effective_share",
)
"""Suffixes of the metrics that are split by staleness: fractions of clipped, truncated and masked tokens, and
comparisons of engine and trainer."""
MEANS = (Reduce.TOKEN_MEAN, Reduce.SAMPLE_MEAN, Reduce.TOKEN_EFFECTIVE_SHARE)


def by_staleness(metrics: Mapping[str, Metric], tokens: TokenInputs, buckets: Buckets) -> dict[str, Metric]:
    """`policy/staleness_N/NAME`: `policy/NAME` over the tokens of bucket N."""
    bucket = buckets.of(tokens.staleness)
    split = {name: metric for name, metric in metrics.items() if name.endswith(SPLIT) and metric.reduce in MEANS}
    found = {}
    for number in range(buckets.last + 1):
        chosen = tokens.loss_mask & (bucket == number)
        for name, metric in split.items():
            mask = chosen if metric.mask is None else metric.mask & chosen
            found[f"policy/staleness_{number}/{name.removeprefix('policy/')}"] = replace(metric, mask=mask)
    return found
