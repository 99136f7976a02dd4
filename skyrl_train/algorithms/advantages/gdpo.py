"""Credit for several rewards per sample."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages.groups import grpo
from skyrl_train.algorithms.credit import CreditInputs, compares_samples, whitened

log = logging.getLogger(__name__)


@compares_samples
def gdpo(inputs: CreditInputs, *, grpo_norm_by_std: bool, gdpo_reward_weights: Mapping[str, float]) -> Tensor:
    """`grpo` of each named reward on its own, their weighted sum, normalised over the samples of the step.

    A reward of little variance then counts as much as one of large variance. Samples without a trained token do not
    count in the last step.

    A reward that no sample of the step has is 0 for all.

    Args: gdpo_reward_weights: name -> weight, 1 where absent.
    Returns: [T] float32. Raises: ValueError if there are no named rewards.
    Source: GDPO, arXiv:2601.05242, equations 4 to 6.
    """
    rewards = inputs.named_rewards
    if not rewards:
        raise ValueError(
            "gdpo needs several rewards: no sample has named ones. Return "
            "metadata={'rewards': {'NAME': value, ...}} from the environment's step"
        )
    if absent := gdpo_reward_weights.keys() - rewards.keys():
        _warn_of_absent(tuple(sorted(absent)), tuple(rewards))
    total = torch.zeros(len(inputs.group_ids), dtype=torch.float64)
    for name, values in rewards.items():
        of_reward = grpo(values.float(), inputs.group_ids, grpo_norm_by_std=grpo_norm_by_std)
        total += gdpo_reward_weights.get(name, 1.0) * of_reward.double()
    is_trained = inputs.sample_sums(inputs.loss_mask) > 0
    return inputs.at_tokens(whitened(total, is_trained)).float()


@functools.cache
def _warn_of_absent(names: tuple[str, ...], present: tuple[str, ...]) -> None:
    """Once for the same names: rows of one kind may lack a reward, and a name may be misspelt."""
    log.warning(
        "trainer.algorithm.gdpo_reward_weights names %s, which no sample of a step has: its rewards are %s, and the "
        "others count as 0 there. Check the names",
        ", ".join(names),
        ", ".join(present),
    )
