"""Groups of samples, or examples -> one batch: everything end to end, no padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs
from skyrl_train.faults import faults_of, listed
from skyrl_train.types import UNKNOWN_VERSION, Example, ExperienceBatch, Group, Metrics, Sample, TokenBatch


def build_experience(groups: Sequence[Group], policy_version: int, vocab_size: int | None = None) -> ExperienceBatch:
    """Concatenate the samples of all groups in order; group_ids are indices into `groups`.

    Args: policy_version: version of the policy that will be trained on them; vocab_size: its tokens, None: unknown.
    Raises: ValueError if there is no group, a group has no sample or ends within a conversation, or a sample cannot be
        trained. Those of rollouts were checked before; sources of a user, and hooks on groups, may give others.
    """
    if not groups:
        raise ValueError("there are no groups to train on: every prompt of the step was dropped")
    if faults := _faults(groups, vocab_size):
        raise ValueError(f"these samples cannot be trained: {listed(faults)}")
    samples = [sample for group in groups for sample in group.samples]
    token_ids = torch.cat([sample.token_ids for sample in samples])
    loss_mask = torch.cat([sample.loss_mask for sample in samples])
    # Rollouts may use other dtypes than the default one does, and for tokens that were not written any value: NaN there
    # would be NaN in the gradients of all.
    rollout_logprobs = torch.cat([sample.rollout_logprobs for sample in samples]).float().masked_fill(~loss_mask, 0.0)
    rewards = torch.cat([sample.rewards.double() for sample in samples])
    bounds = torch.tensor([0] + [len(sample.token_ids) for sample in samples]).cumsum(0)
    sizes = torch.tensor([len(group.samples) for group in groups])
    return ExperienceBatch(
        token_ids=token_ids,
        cu_seqlens=bounds.to(torch.int32),
        loss_mask=loss_mask,
        group_ids=torch.repeat_interleave(sizes),
        rollout_logprobs=rollout_logprobs,
        staleness=_staleness(samples, loss_mask, bounds, policy_version),
        rewards=rewards,
        named_rewards={
            name: torch.tensor([sample.named_rewards.get(name, 0.0) for sample in samples], dtype=torch.float64)
            for name in sorted({name for sample in samples for name in sample.named_rewards})
        },
        baselines=torch.repeat_interleave(_greedy_rewards(groups), sizes) if all(g.greedy for g in groups) else None,
        ends_conversation=torch.tensor([sample.ends_conversation for sample in samples]),
    )


def _greedy_rewards(groups: Sequence[Group]) -> Tensor:
    """[num_groups] float64"""
    return torch.tensor([group.greedy_reward for group in groups], dtype=torch.float64)


def _staleness(samples: Sequence[Sample], loss_mask: Tensor, bounds: Tensor, policy_version: int) -> Tensor:
    """[T] int32: versions since each token was written; -1 where unknown or the policy did not write it.

    Args: loss_mask [T]; bounds [B + 1]: where samples begin.
    """
    num_written = torch.nn.functional.pad(loss_mask.cumsum(0), (1, 0))[bounds].diff().tolist()
    behind, counts = [], []
    for sample, count in zip(samples, num_written, strict=True):
        spans = sample.version_spans
        if not spans or sum(tokens for _, tokens in spans) != count:
            spans = ((sample.policy_version, count),)
        behind += [-1 if version == UNKNOWN_VERSION else max(0, policy_version - version) for version, _ in spans]
        counts += [tokens for _, tokens in spans]
    staleness = torch.full(loss_mask.shape, -1, dtype=torch.int32)
    staleness[loss_mask] = torch.tensor(behind, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    return staleness


def build_examples(examples: Sequence[Example]) -> TokenBatch:
    """Concatenate the examples, each its own group."""
    bounds = torch.tensor([0] + [len(example.token_ids) for example in examples]).cumsum(0)
    return TokenBatch(
        token_ids=torch.cat([example.token_ids for example in examples]),
        cu_seqlens=bounds.to(torch.int32),
        loss_mask=torch.cat([example.loss_mask for example in examples]),
        group_ids=torch.arange(len(examples)),
    )


def credit_inputs(
    experience: ExperienceBatch, kl: Tensor | None = None, kl_coef: float = 0.0, values: Tensor | None = None
) -> CreditInputs:
    """Inputs of the advantage estimator: the samples of one conversation are joined, so that it compares conversations
    and every token of one is credited with what the conversation earned.

    Args: kl [T]: KL divergence from the reference, subtracted from the rewards of the tokens that the policy wrote;
            values [T]: those of the critic.
    """
    rewards = experience.rewards
    if kl is not None:
        rewards = rewards - kl_coef * kl.double().masked_fill(~experience.loss_mask, 0)
    signals = {} if values is None else {"values": values}
    ends = experience.ends_conversation
    if ends is None:
        ends = torch.ones_like(experience.group_ids, dtype=torch.bool)
    conversation = ends.cumsum(0) - ends.long()  # [B]
    named = {
        name: values.new_zeros(int(ends.sum())).index_add_(0, conversation, values)
        for name, values in experience.named_rewards.items()
    }
    return CreditInputs(
        rewards,
        experience.loss_mask,
        torch.cat([experience.cu_seqlens[:1], experience.cu_seqlens[1:][ends]]),
        experience.group_ids[ends],
        signals,
        named_rewards=named,
        baselines=None if experience.baselines is None else experience.baselines[ends],
    )


def sample_means(experience: ExperienceBatch, values: Tensor) -> Tensor:
    """[T] -> float64: mean over the trained tokens of each conversation that has any."""
    inputs = credit_inputs(experience)
    sums, counts = (inputs.sample_sums(x) for x in (values.masked_fill(~inputs.loss_mask, 0), inputs.loss_mask))
    return (sums / counts.clamp(min=1))[counts > 0]


def credit_metrics(inputs: CreditInputs, advantages: Tensor, experience: ExperienceBatch) -> Metrics:
    """Mean reward of the conversations, mean advantage of the trained tokens (0 without any), groups without signal.
    Args: experience: the rewards without a penalty.
    """
    rewards = inputs.sample_rewards
    num_tokens = inputs.sample_sums(inputs.loss_mask)
    share = num_tokens / num_tokens.sum().clamp(min=1)
    trained = advantages.masked_fill(~inputs.loss_mask, 0)
    means, sizes = (inputs.sample_sums(x) / num_tokens.clamp(min=1) for x in (trained, trained.abs()))
    return {
        "loss/avg_final_rewards": float(rewards.double().mean()),
        "loss/avg_raw_advantages": float((means * share).sum()),
        "loss/avg_raw_advantages_abs": float((sizes * share).sum()),
        "reward/zero_variance_share": _zero_variance_share(credit_inputs(experience).sample_rewards, inputs.group_ids),
    }


def _zero_variance_share(rewards: Tensor, group_ids: Tensor) -> float:
    _, sizes = torch.unique_consecutive(group_ids, return_counts=True)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    differs = rewards != rewards[first]
    group = torch.repeat_interleave(sizes)
    num_differing = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, group, differs.to(torch.int64))
    return float((num_differing == 0).double().mean())


def _faults(groups: Sequence[Group], vocab_size: int | None) -> list[str]:
    """Errors of the groups that cannot be trained on."""
    empty = [f"{group.prompt.name} has no samples" for group in groups if not group.samples]
    samples = [
        f"sample {number} of {group.prompt.name} {fault}"
        for group in groups
        for number, sample in enumerate(group.samples)
        for fault in faults_of(sample, vocab_size)
    ]
    cut = [
        f"the last sample of {group.prompt.name} has ends_conversation=False: the last of a conversation ends it"
        for group in groups
        if not samples and group.samples and not group.samples[-1].ends_conversation
    ]
    return empty + samples + cut
