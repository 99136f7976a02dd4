"""Two buffers of a sender that broadcasts: while one is on its way, the next is filled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.weight_sync.control import Check

BUFFERS = 2
Land = Callable[[Check], None]
"""Waits for the end of a broadcast, and looks after the receivers meanwhile."""


class Flight:
    """The buffers stay for the next update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._under_way: list[Land | None] = [None] * BUFFERS
        self.num_sent = 0

    @property
    def _slot(self) -> int:
        return self.num_sent % BUFFERS

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        """[num_bytes] uint8 that is not being sent; waits for one."""
        self._land(self._slot, check)
        buffer = self._buffers[self._slot]
        if buffer is None or len(buffer) < num_bytes:
            self._buffers[self._slot] = buffer = None  # freed before the larger one is made
            buffer = self._buffers[self._slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer[:num_bytes]

    def send(self, num_bytes: int, broadcast: Callable[[Tensor], Land]) -> None:
        """Broadcast the start of the last buffer."""
        buffer = self._buffers[self._slot]
        assert buffer is not None
        self._under_way[self._slot] = broadcast(buffer[:num_bytes])
        self.num_sent += 1

    def drain(self, check: Check) -> None:
        """Wait for all that was sent."""
        for slot in range(BUFFERS):
            self._land(slot, check)

    def _land(self, slot: int, check: Check) -> None:
        land, self._under_way[slot] = self._under_way[slot], None
        if land is not None:
            land(check)

    def forget(self) -> None:
        """Nobody waits for what is under way any more."""
        self._under_way = [None] * BUFFERS
