"""The order in which rows are trained on: shuffled anew for each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class OrderState:
    """Between two batches: all that decides what comes next."""

    epoch: int
    position: int
    """Rows of the epoch that were given out."""
    num_rows: int
    seed: int

    def require(self, num_rows: int, seed: int) -> None:
        """Raises: ValueError for another seed or number of rows, which have another order."""
        if (num_rows, seed) != (self.num_rows, self.seed):
            raise ValueError(
                f"the checkpoint is of {self.num_rows} training rows in the order of trainer.seed={self.seed}, and "
                f"these are {num_rows} rows with trainer.seed={seed}: which of them were trained on cannot be told. "
                "Give the same data and seed, or start a new run from a Hugging Face export (trainer.hf_save_interval)"
            )


class Order(Generic[Row]):
    """Endless batches of rows (prompts, or the examples of supervised fine-tuning).

    Each epoch is another permutation, its last incomplete batch is left out. The order depends on the seed, the epoch
    and the number of rows alone.

    Raises: ValueError if there are fewer rows than a batch needs.
    """

    def __init__(self, rows: Sequence[Row], *, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= len(rows):
            raise ValueError(
                f"trainer.train_batch_size={batch_size} must be between 1 and the number of training rows, {len(rows)}"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch if self._has_batch() else self._epoch + 1

    def next_batch(self) -> list[Row]:
        """[batch_size] rows, none of them twice within an epoch."""
        if not self._has_batch():
            self._epoch, self._position = self._epoch + 1, 0
            self._permutation = self._permute()
        batch = self._permutation[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [self._rows[index] for index in batch]

    @property
    def state(self) -> OrderState:
        return OrderState(self._epoch, self._position, len(self._rows), self._seed)

    def go_on(self, state: OrderState) -> None:
        """The next batch is the one that would have followed. Raises: as `OrderState.require`."""
        state.require(len(self._rows), self._seed)
        self._epoch, self._position = state.epoch, state.position
        self._permutation = self._permute()

    def _has_batch(self) -> bool:
        return self._position + self._batch_size <= len(self._rows)

    def _permute(self) -> list[int]:
        # A prime factor keeps (seed, epoch) pairs apart: epoch 1 of seed 42 is not epoch 0 of seed 43.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(len(self._rows), generator=generator).tolist()
