"""Groups of samples, or examples, -> one ExperienceBatch: everything end to end, no padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.types import Example, ExperienceBatch, Group, Metrics, Sample

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [B] float32, group_ids [B] int64) -> advantages [B] float32: an entry of `ADVANTAGES` with its settings."""


def build_experience(groups: Sequence[Group], advantage: Advantage) -> ExperienceBatch:
    """Lay the samples of all groups end to end, in order, and give each its advantage.

    Returns: an ExperienceBatch whose group_ids are the indices of `groups`.
    Raises: ValueError if there is no group, a group has no sample, a reward is not finite, or the tensors of a sample
        differ in length.
    """
    if not groups:
        raise ValueError("there are no groups to train on; every prompt of the step was dropped")
    samples = [sample for group in groups for sample in group.samples]
    token_ids = torch.cat([sample.token_ids for sample in samples])
    loss_mask = torch.cat([sample.loss_mask for sample in samples])
    rollout_logprobs = torch.cat([sample.rollout_logprobs for sample in samples])
    bounds = torch.tensor([0] + [len(sample.token_ids) for sample in samples]).cumsum(0)
    sizes = torch.tensor([len(group.samples) for group in groups])
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    if not (
        len(token_ids) == len(loss_mask) == len(rollout_logprobs)
        and bool(sizes.all())
        and bool(torch.isfinite(rewards).all())
    ):
        raise ValueError("; ".join(_faults(groups)))
    group_ids = torch.repeat_interleave(sizes)
    return ExperienceBatch(
        token_ids=token_ids,
        cu_seqlens=bounds.to(torch.int32),
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        rewards=rewards,
        advantages=advantage(rewards, group_ids),
        group_ids=group_ids,
    )


def examples_as_experience(examples: Sequence[Example]) -> ExperienceBatch:
    """Examples end to end, each a group of its own without reward: what is trained is its loss_mask."""
    bounds = torch.tensor([0] + [len(example.token_ids) for example in examples]).cumsum(0)
    nothing = torch.zeros(len(examples))
    return ExperienceBatch(
        token_ids=torch.cat([example.token_ids for example in examples]),
        cu_seqlens=bounds.to(torch.int32),
        loss_mask=torch.cat([example.loss_mask for example in examples]),
        rollout_logprobs=torch.zeros(int(bounds[-1])),
        rewards=nothing,
        advantages=nothing,
        group_ids=torch.arange(len(examples)),
    )


def with_kl_penalty(
    experience: ExperienceBatch, kl_per_sample: Tensor, kl_coef: float, advantage: Advantage
) -> ExperienceBatch:
    """The same experience with `rewards - kl_coef * kl_per_sample` and the advantages of these rewards.

    Args: kl_per_sample [B] float32, the sum of the per-token KL over the tokens the policy wrote.
    Raises: ValueError if kl_per_sample is not [B].
    """
    if kl_per_sample.shape != experience.rewards.shape:
        raise ValueError(
            f"kl_per_sample has shape {tuple(kl_per_sample.shape)}; one value is needed for each of the "
            f"{experience.num_samples} samples"
        )
    rewards = experience.rewards - kl_coef * kl_per_sample
    return replace(experience, rewards=rewards, advantages=advantage(rewards, experience.group_ids))


def experience_metrics(experience: ExperienceBatch) -> Metrics:
    """Rewards over samples, advantages over the tokens they will be applied to, and groups that teach nothing.

    `reward/zero_variance_share` is the share of groups (of 0 to 1) whose rewards are all equal: under a group-relative
    estimator their advantages are 0. Advantages are 0 where no token is trained.
    """
    written = torch.nn.functional.pad(experience.loss_mask.cumsum(0), (1, 0))
    num_tokens = written[experience.cu_seqlens.to(torch.int64)].diff()
    share = num_tokens.double() / num_tokens.sum().clamp(min=1)
    return {
        "loss/avg_final_rewards": float(experience.rewards.double().mean()),
        "loss/avg_raw_advantages": float((experience.advantages * share).sum()),
        "loss/avg_raw_advantages_abs": float((experience.advantages.abs() * share).sum()),
        "reward/zero_variance_share": _zero_variance_share(experience),
    }


def _zero_variance_share(experience: ExperienceBatch) -> float:
    _, sizes = torch.unique_consecutive(experience.group_ids, return_counts=True)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    differs = experience.rewards != experience.rewards[first]
    group = torch.repeat_interleave(sizes)
    num_differing = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, group, differs.to(torch.int64))
    return float((num_differing == 0).double().mean())


def _faults(groups: Sequence[Group]) -> list[str]:
    """What is wrong with each group that cannot be trained on."""
    empty = [f"prompt {group.prompt.uid} has no samples" for group in groups if not group.samples]
    samples = [
        f"sample {number} of prompt {group.prompt.uid} {fault}"
        for group in groups
        for number, sample in enumerate(group.samples)
        for fault in _sample_faults(sample)
    ]
    return empty + samples


def _sample_faults(sample: Sample) -> list[str]:
    lengths = len(sample.token_ids), len(sample.loss_mask), len(sample.rollout_logprobs)
    faults = []
    if len(set(lengths)) > 1:
        faults.append("has {} token_ids, {} loss_mask, {} rollout_logprobs; they must be equal".format(*lengths))
    if not torch.isfinite(torch.tensor(sample.reward)):
        faults.append(f"has reward {sample.reward}; the environment must return finite rewards")
    return faults
