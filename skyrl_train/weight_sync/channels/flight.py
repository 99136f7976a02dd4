"""Two buffers of one end of a broadcast: while one is in flight, the other is filled or loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.weight_sync.control import Check

BUFFERS = 2
Land = Callable[[Check], None]
"""Waits for the end of a broadcast, and checks the other ends during that time."""


class Flight:
    """The buffers stay for the next update."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
        self._sizes = [0] * BUFFERS
        self._in_flight: list[Land | None] = [None] * BUFFERS
        self.num_sent = 0
        self._num_received = 0

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        """[num_bytes] uint8 that is not in flight; waits for one."""
        slot = self.num_sent % BUFFERS
        self._land(slot, check)
        if len(self._buffers[slot]) < num_bytes:
            self._buffers[slot] = self._buffers[slot].new_empty(0)  # freed before the larger one is made
            self._buffers[slot] = self._buffers[slot].new_empty(num_bytes)
        self._sizes[slot] = num_bytes
        return self._buffers[slot][:num_bytes]

    def send(self, broadcast: Callable[[Tensor], Land]) -> None:
        """Broadcast the last buffer."""
        slot = self.num_sent % BUFFERS
        self._in_flight[slot] = broadcast(self._buffers[slot][: self._sizes[slot]])
        self.num_sent += 1

    def receive(self, check: Check) -> Tensor:
        """Wait for the next broadcast that was begun. Returns: its buffer."""
        slot = self._num_received % BUFFERS
        self._land(slot, check)
        self._num_received += 1
        return self._buffers[slot][: self._sizes[slot]]

    def drain(self, check: Check) -> None:
        for slot in range(BUFFERS):
            self._land(slot, check)

    def _land(self, slot: int, check: Check) -> None:
        land, self._in_flight[slot] = self._in_flight[slot], None
        if land is not None:
            land(check)
