"""Small inputs, on which functions are called before a run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.objective import Bound
from skyrl_train.algorithms.selection import MiniBatch, selected


def sample_of_three(
    needs: tuple[str, ...], selections: tuple[Bound, ...], *, has_advantages: bool = True
) -> TokenInputs:
    logprobs = torch.tensor([-0.5, -1.0, -1.5], requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    always = {
        "old_logprobs": torch.tensor([-0.6, -1.0, -1.4]),
        "rollout_logprobs": torch.tensor([-0.5, -1.1, -1.5]),
        "advantages": torch.tensor([1.0, 1.0, -1.0]) if has_advantages else torch.zeros(3),
        "staleness": torch.zeros(3, dtype=torch.int32),
    }
    others = torch.tensor([-0.7, -1.0, -1.3])
    declared = {
        "ref_logprobs": {"ref_logprobs": others},
        "entropy": {"entropy": logprobs.exp()},
        "teacher_logprobs": {"teacher_logprobs": others},
        "topk_logprobs": {
            "topk_logprobs": torch.stack([logprobs, logprobs - 1], 1),
            "teacher_topk_logprobs": torch.stack([others, others - 1], 1),
        },
    }
    signals: dict[str, Tensor] = dict(always)
    for name in needs:
        signals |= declared.get(name, {})
    old = {"old_logprobs": always["old_logprobs"], "old_entropy": logprobs.detach().exp()}
    batch = MiniBatch(torch.arange(3), torch.tensor([0, 3], dtype=torch.int32), mask, always["advantages"], old)
    signals |= selected(selections, batch)
    return TokenInputs(logprobs, mask, PerSample(torch.zeros(3, dtype=torch.int64), 1, mask), signals)


def two_samples_of_two(reward_names: Iterable[str]) -> CreditInputs:
    """One group of two samples. Args: reward_names: names of rewards besides `reward`."""
    return CreditInputs(
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        loss_mask=torch.tensor([False, True, False, True]),
        cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
        group_ids=torch.tensor([0, 0]),
        signals={"values": torch.tensor([0.5, 0.25, 0.0, 0.5])},
        named_rewards={name: torch.tensor([1.0, 0.0], dtype=torch.float64) for name in ("reward", *reward_names)},
        baselines=torch.zeros(2, dtype=torch.float64),
    )
