"""The order of the training rows, shuffled again for each epoch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Row = TypeVar("Row")
HASHED_ROWS = 10_000
"""Rows whose contents a checkpoint records; 10,000 prompts of 4 kB take 0.4 s."""


@dataclass(frozen=True, slots=True)
class OrderState:
    """Position in the shuffled data (rows of the epoch already used), for resuming."""

    epoch: int
    position: int
    num_rows: int
    seed: int
    sha256: str | None = None
    """Digest of the rows, or of about HASHED_ROWS of them; None in older checkpoints."""

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> OrderState:
        """Read a state from a checkpoint. Raises: ValueError for other fields."""
        try:
            return cls(**saved)
        except TypeError:
            raise ValueError(
                f"cannot resume: the checkpoint was written by another source of groups ({dict(saved)!r:.200}). Set "
                "trainer.source, and trainer.over_sampling_batch_size, as there"
            ) from None

    def require(self, num_rows: int, seed: int) -> None:
        """Raises: ValueError for another seed or number of rows, with which the order differs."""
        if (num_rows, seed) != (self.num_rows, self.seed):
            raise ValueError(
                f"cannot resume: the checkpoint was written with {self.num_rows} training rows and "
                f"trainer.seed={self.seed}, this run has {num_rows} rows and trainer.seed={seed}. Use the same data "
                "and seed, or start a new run from a Hugging Face export (trainer.hf_save_interval)"
            )


class Order(Generic[Row]):
    """Endless batches of rows (prompts or examples).

    Each epoch is a new permutation without its incomplete last batch. The order depends only on the seed, the epoch,
    the number of rows and batch_size, not on how many rows are taken at once. Raises: ValueError if there are fewer
    rows than a batch needs.
    """

    def __init__(self, rows: Sequence[Row], *, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= len(rows):
            raise ValueError(
                f"trainer.train_batch_size is {batch_size}: it must be between 1 and the number of training rows, "
                f"{len(rows)}"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._epoch_size = len(rows) // batch_size * batch_size
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute()

    @property
    def epoch(self) -> int:
        """Epoch of the last returned rows, from 0."""
        return self._epoch

    def next_batch(self) -> list[Row]:
        """[batch_size] rows, none of them twice within an epoch."""
        return self.next_rows(self._batch_size)

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows, or fewer if the epoch ends with them."""
        if self._position >= self._epoch_size:
            self._epoch, self._position = self._epoch + 1, 0
            self._permutation = self._permute()
        first, self._position = self._position, min(self._position + num_rows, self._epoch_size)
        return [self._rows[index] for index in self._permutation[first : self._position]]

    @property
    def state(self) -> dict[str, Any]:
        return asdict(OrderState(self._epoch, self._position, len(self._rows), self._seed, self._sha256))

    @cached_property
    def _sha256(self) -> str:
        total, every = hashlib.sha256(), max(1, len(self._rows) // HASHED_ROWS)
        for index in range(0, len(self._rows), every):
            total.update(_bytes(self._rows[index]))
        return total.hexdigest()

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue with the next batch. Raises: like `OrderState.read` and `require`."""
        state = OrderState.read(saved)
        state.require(len(self._rows), self._seed)
        if state.sha256 not in (None, self._sha256):
            log.warning(
                "the training rows have changed since the checkpoint was written. Their order continues: if rows were "
                "moved, some are trained twice in this epoch and others not at all"
            )
        self._epoch, self._position = state.epoch, state.position
        self._permutation = self._permute()

    def _permute(self) -> list[int]:
        # The factor exceeds any number of epochs, so each (seed, epoch) has its own generator seed.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(len(self._rows), generator=generator).tolist()


def row_of(rows: Mapping[str, Row], uid: str) -> Row:
    """A row that a checkpoint names. Args: rows: by uid. Raises: ValueError."""
    if uid not in rows:
        raise ValueError(
            f"cannot resume: the checkpoint names the row {uid}, which is not among this run's training rows. Use the "
            "data, and the settings that filter it, with which the checkpoint was written"
        )
    return rows[uid]


def _bytes(row: object) -> bytes:
    """Bytes that differ if rows do; of values that JSON does not have, only the type counts."""
    if isinstance(row, Tensor):
        return row.numpy().tobytes()
    if is_dataclass(row):
        # Not where the row lies: the same rows may have moved to another folder.
        return b"".join(_bytes(getattr(row, field.name)) for field in fields(row) if field.compare)
    try:
        return json.dumps(row, sort_keys=True, default=_content).encode()
    except (TypeError, ValueError):  # keys that JSON does not have, or a circle
        return type(row).__name__.encode()


def _content(value: Any) -> object:
    """A value that JSON has, in place of one that it does not have."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
