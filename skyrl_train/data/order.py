"""The order in which prompts are trained on: shuffled anew for each epoch, resumable from two integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.types import Prompt


class PromptOrder:
    """Endless batches of prompts; each epoch is another permutation, its last incomplete batch is left out.

    The order depends on the seed, the epoch and the number of prompts alone, so a run that restores `state_dict`
    goes on exactly where it stopped.

    Raises: ValueError if there are fewer prompts than a batch needs.
    """

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= len(prompts):
            raise ValueError(
                f"trainer.train_batch_size={batch_size} must be between 1 and the number of training prompts, "
                f"{len(prompts)}"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch if self._has_batch() else self._epoch + 1

    def next_batch(self) -> list[Prompt]:
        """[batch_size] prompts, none of them twice within an epoch."""
        if not self._has_batch():
            self._start(epoch=self._epoch + 1, position=0)
        batch = self._permutation[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [self._prompts[index] for index in batch]

    def state_dict(self) -> dict[str, int]:
        """`epoch` and `position`, the number of prompts of that epoch already handed out."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises: ValueError if the state cannot be of these prompts."""
        if state["epoch"] < 0 or not 0 <= state["position"] <= len(self._prompts):
            raise ValueError(
                f"cannot resume the data order at {state}: there are {len(self._prompts)} training prompts; "
                "resume with the data set that the run was started with"
            )
        self._start(epoch=state["epoch"], position=state["position"])

    def _has_batch(self) -> bool:
        return self._position + self._batch_size <= len(self._prompts)

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._permutation = self._permute()

    def _permute(self) -> list[int]:
        # A prime factor keeps (seed, epoch) pairs apart: epoch 1 of seed 42 is not epoch 0 of seed 43.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(len(self._prompts), generator=generator).tolist()
