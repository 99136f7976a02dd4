"""Shards of a step's batch in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl_train.types import TokenBatch, TrainBatch


class Shards:
    """A step's TrainBatches in the object store, one per data-parallel rank; each rank fetches its own."""

    def __init__(self, batches: Sequence[TrainBatch]) -> None:
        self.batches = batches

    @cached_property
    def refs(self) -> list[Any]:
        """References to the batches, which are put into the object store when a rank first needs them."""
        return [ray.put(batch) for batch in self.batches]

    @property
    def step_id(self) -> int:
        return self.batches[0].step_id

    def only(self, is_chosen: Sequence[bool]) -> Shards:
        """Shards whose micro-batches have the chosen samples alone. Args: is_chosen: [B] of the batch."""

        def chosen(batch: TrainBatch, samples: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sample for sample in samples if is_chosen[int(batch.sample_ids[sample])])

        return Shards(
            [
                replace(
                    batch,
                    mini_batches=tuple(
                        tuple(chosen(batch, samples) for samples in mini_batch) for mini_batch in batch.mini_batches
                    ),
                )
                for batch in self.batches
            ]
        )

    def put_each(self, results: Sequence[Any]) -> list[Any]:
        """References to the result of each shard."""
        return [ray.put(result) for result in results]

    def put(self, values: Tensor, batch: TokenBatch) -> list[Any]:
        """References to each shard's part of values [T] of the batch."""
        parts = torch.split(values, batch.lengths.tolist())
        empty = values.new_empty(0)
        return [ray.put(torch.cat([empty, *(parts[i] for i in shard.sample_ids)])) for shard in self.batches]

    def merged(self, results: Sequence[Tensor], batch: TokenBatch) -> Tensor:
        """Values [T] of the batch from those of each shard."""
        parts: list[Tensor] = [results[0].new_empty(0)] * batch.num_samples
        for shard, values in zip(self.batches, results, strict=True):
            own = torch.split(values, shard.cu_seqlens.diff().tolist())
            for sample, part in zip(shard.sample_ids.tolist(), own, strict=True):
                parts[sample] = part
        return torch.cat(parts)
