"""What a rank keeps between computing the logprobs of a step's samples and its update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.types import TrainBatch


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Logprobs that an update compares with."""

    batch: TrainBatch
    policy_version: int
    values: Tensor
    """[T] float32"""

    def of(self, batch: TrainBatch, policy_version: int) -> Tensor | None:
        """None for other samples or weights: of a job that failed before its update."""
        mine = self.batch
        same = torch.equal(mine.token_ids, batch.token_ids) and torch.equal(mine.cu_seqlens, batch.cu_seqlens)
        return self.values if same and self.policy_version == policy_version else None
