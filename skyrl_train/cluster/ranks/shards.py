"""A step's batches on their way to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl_train.types import TokenBatch, TrainBatch


class Shards:
    """A step's TrainBatches in the object store, one per data-parallel rank; each rank fetches its own."""

    def __init__(self, batches: Sequence[TrainBatch]) -> None:
        self.batches = batches
        self.refs = [ray.put(batch) for batch in batches]

    def put(self, values: Tensor, whole: TokenBatch) -> list[Any]:
        """References to each shard's part of values [T] of the whole batch."""
        parts = torch.split(values, whole.lengths.tolist())
        nothing = values.new_empty(0)
        return [ray.put(torch.cat([nothing, *(parts[i] for i in batch.sample_ids)])) for batch in self.batches]

    def whole(self, results: Sequence[Tensor], whole: TokenBatch) -> Tensor:
        """[T] of the whole batch from those of each shard."""
        parts: list[Tensor] = [results[0].new_empty(0)] * whole.num_samples
        for batch, values in zip(self.batches, results, strict=True):
            own = torch.split(values, batch.cu_seqlens.diff().tolist())
            for sample, part in zip(batch.sample_ids.tolist(), own, strict=True):
                parts[sample] = part
        return torch.cat(parts)
