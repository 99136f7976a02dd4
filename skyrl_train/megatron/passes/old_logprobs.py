"""Logprobs that a rank keeps between their own pass over a step's samples and the update that compares with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.types import TrainBatch


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Logprobs of a step's samples, and everything that their values depend on: the tokens and the weights."""

    batch: TrainBatch
    policy_version: int
    values: Tensor | None
    """[T] float32; None on a pipeline stage without the output layer."""

    def are_of(self, batch: TrainBatch, policy_version: int) -> bool:
        """Whether they are those of this step, and not of a job that failed before its update."""
        mine = self.batch
        same = torch.equal(mine.token_ids, batch.token_ids) and torch.equal(mine.cu_seqlens, batch.cu_seqlens)
        return same and self.policy_version == policy_version


def old_logprobs(
    kept: OldLogprobs | None, batch: TrainBatch, policy_version: int, num_optimizer_steps: int
) -> Tensor | None:
    """Return the kept logprobs of an update, [T] float32.

    None means that the update's own forward pass yields them: always on a stage without the output layer, and for an
    update of one optimizer step, which computes under the weights before the update anyway.

    Raises: RuntimeError if an update of several optimizer steps finds none of its samples and weights. The first step
        changes the weights, so the later ones would be compared with a policy that is not the old one.
    """
    if kept is not None and kept.are_of(batch, policy_version):
        return kept.values
    if num_optimizer_steps == 1:
        return None
    found = (
        "none are kept" if kept is None else f"the kept ones are of other samples or of version {kept.policy_version}"
    )
    raise RuntimeError(
        f"an update of {num_optimizer_steps} optimizer steps needs the old logprobs of its samples under policy "
        f"version {policy_version}, and {found}. Compute them with keep_old_logprobs(batch) right before update(batch)"
    )
