"""What a finished group is worth: rewards and loss masks of truncated samples, and groups without signal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from skyrl_train.config import Config
from skyrl_train.rollout.seeds import seed
from skyrl_train.types import Group, Sample, conversations


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group's conversations, with that of its greedy response, differ in float32, in which
    estimators read them: the same rewards in another order add up to the same. A group of one counts as different.
    """
    greedy = [group.greedy_reward] if group.greedy else []
    rewards = torch.tensor([*group.rewards, *greedy], dtype=torch.float32).tolist()
    return len(rewards) == 1 or len(set(rewards)) > 1


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Soft punishment of long responses: 0 up to max_length - buffer tokens, then linear up to factor at max_length.

    Never above factor. Source: DAPO, arXiv:2503.14476, section 3.4.
    """
    return min(max(0.0, (length - (max_length - buffer)) / buffer), 1.0) * factor


def zero_unfinished(group: Group) -> Group:
    """The group without the rewards of conversations that did not end by themselves."""

    def zeroed(conversation: list[Sample]) -> list[Sample]:
        is_finished = conversation[-1].stop_reason == "stop"
        return conversation if is_finished else [_without_rewards(sample) for sample in conversation]

    return _each(group, zeroed)


def _each(group: Group, change: Callable[[list[Sample]], list[Sample]]) -> Group:
    """The group with all conversations changed, greedy ones too."""
    samples, greedy = (
        tuple(sample for conversation in conversations(some) for sample in change(conversation))
        for some in (group.samples, group.greedy)
    )
    return Group(group.prompt, samples, greedy)


class Shaping:
    """Applies the configured penalties and masks to finished groups."""

    def __init__(self, config: Config) -> None:
        generator, algorithm = config.generator, config.trainer.algorithm
        self._zeroes_unfinished = generator.zero_reward_on_non_stop
        self._masks_overlong = generator.apply_overlong_filtering
        self._masks_groups = algorithm.zero_variance_filter
        self._buffer = algorithm.overlong_buffer
        self._max_length = generator.sampling_params.max_generate_length

    def __call__(self, group: Group) -> Group:
        """The group with the rewards and loss masks that are trained."""
        group = zero_unfinished(group) if self._zeroes_unfinished else group
        group = _each(group, self._shaped)
        if self._masks_groups and not has_signal(group):
            group = replace(group, samples=tuple(_masked(sample) for sample in group.samples))
        return group

    def _shaped(self, samples: list[Sample]) -> list[Sample]:
        """A conversation ends as its last sample does, and is as long as all together."""
        if self._buffer.len is not None:
            length = sum(int(sample.loss_mask.sum()) for sample in samples)
            penalty = overlong_penalty(length, self._max_length, self._buffer.len, self._buffer.penalty_factor)
            is_named = any(sample.named_rewards for sample in samples)
            if penalty or is_named:
                samples[-1] = _penalised(samples[-1], penalty, is_named=is_named)
        if self._masks_overlong and samples[-1].stop_reason == "length":
            samples = [_masked(sample) for sample in samples]
        return samples


def copies(groups: Sequence[Group], number: int, run_seed: int) -> list[Group]:
    """`number` of the groups at random, each as often as any other up to one. The choice depends on the arguments."""
    chosen = random.Random(seed("replace", run_seed, *(group.prompt.uid for group in groups)))
    result: list[Group] = []
    while len(result) < number:
        result += chosen.sample(groups, min(number - len(result), len(groups)))
    return result


def _masked(sample: Sample) -> Sample:
    """The sample without a trained token; its reward still counts in its group."""
    return replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def _without_rewards(sample: Sample) -> Sample:
    named = dict.fromkeys(sample.named_rewards, 0.0)
    return replace(sample, rewards=torch.zeros_like(sample.rewards), named_rewards=named)


def _penalised(sample: Sample, penalty: float, *, is_named: bool) -> Sample:
    """Args: is_named: whether the conversation has named rewards, and so the penalty too, also one of 0."""
    rewards = sample.rewards.to(torch.float64, copy=True)
    rewards[-1] -= penalty
    named = {**sample.named_rewards, "overlong": 0.0 - penalty} if is_named else {}
    return replace(sample, rewards=rewards, named_rewards=named)
