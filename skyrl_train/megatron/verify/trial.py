"""A mini-batch and its objective, for any layout and implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses.ppo import regular
from skyrl_train.algorithms.objective import Bound, Objective, Term, kl_to_reference, negative_entropy
from skyrl_train.algorithms.reductions import MaxLengths
from skyrl_train.config.policy import LoraConfig
from skyrl_train.types import ExperienceBatch


@dataclass(frozen=True, slots=True)
class Trial:
    """A mini-batch and its objective, for any layout."""

    model_path: str
    experience: ExperienceBatch
    advantages: Tensor
    """[T] float32"""
    old_offsets: Tensor
    """[T] float32: old logprobs = logprobs of this forward pass + these, as if the policy had been updated."""
    ref_offsets: Tensor
    """[T] float32: the same for the logprobs of the reference and of a teacher."""
    objective: Objective
    max_lengths: MaxLengths
    teacher_topk: tuple[Tensor, Tensor] | None = None
    """Ids [T, k] int32 and logprobs [T, k] float32 of a teacher's likeliest tokens."""
    bf16: bool = False
    lora: LoraConfig | None = None
    """Adapters to train; the outcome then has their gradients."""

    @property
    def teacher_signals(self) -> dict[str, Tensor]:
        """Signals of `teacher_topk`."""
        if self.teacher_topk is None:
            return {}
        return dict(zip(("teacher_topk_ids", "teacher_topk_logprobs"), self.teacher_topk, strict=True))


def random_trial(
    model_path: str,
    lengths: Sequence[int],
    num_prompt_tokens: Sequence[int],
    vocab_size: int,
    *,
    padding: int | None = None,
    temperature: float = 1.0,
    bf16: bool = False,
) -> Trial:
    """Random tokens and advantages, groups of one, under `trial_objective`.
    Args: lengths of the samples; padding: a token for a tenth of the positions, or None.
    """
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    token_ids = torch.randint(0, vocab_size, (total,), generator=generator)
    if padding is not None and 0 <= padding < vocab_size:
        token_ids[torch.randperm(total, generator=generator)[: total // 10]] = padding
    sizes = bounds.diff()
    position = torch.arange(total) - torch.repeat_interleave(bounds[:-1], sizes)
    loss_mask = position >= torch.repeat_interleave(torch.tensor(num_prompt_tokens), sizes)
    advantages = torch.randn(len(lengths), generator=generator)
    return Trial(
        model_path=model_path,
        experience=ExperienceBatch(
            token_ids=token_ids,
            cu_seqlens=bounds.int(),
            loss_mask=loss_mask,
            group_ids=torch.arange(len(lengths)),
            rollout_logprobs=torch.randn(total, generator=generator),
            staleness=torch.zeros(total, dtype=torch.int32),
            rewards=torch.zeros(total, dtype=torch.float64),
        ),
        advantages=torch.repeat_interleave(advantages, sizes),
        old_offsets=0.2 * torch.randn(total, generator=generator),
        ref_offsets=0.3 * torch.randn(total, generator=generator),
        objective=trial_objective(temperature),
        max_lengths=MaxLengths(max(lengths), 2 * max(lengths)),
        bf16=bf16,
    )


def trial_objective(temperature: float, eps_clip_high: float = 0.2) -> Objective:
    """A clipped policy loss with an entropy and a KL term."""
    return Objective(
        terms=(
            Term("policy", Bound(regular, {"eps_clip_low": 0.2, "eps_clip_high": eps_clip_high})),
            Term("entropy", Bound(negative_entropy), 0.05),
            Term("kl", Bound(kl_to_reference, {"estimator": k3, "use_unbiased_kl": False}), 0.1),
        ),
        temperature=temperature,
    )
