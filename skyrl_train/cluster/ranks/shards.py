"""A step's batches on their way to the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from skyrl_train.types import TrainBatch


class Shards:
    """A step's TrainBatches in the object store, one per data-parallel rank; each rank fetches its own."""

    def __init__(self, batches: Sequence[TrainBatch]) -> None:
        self.batches = batches
        self.refs = [ray.put(batch) for batch in batches]
