"""The metrics of finished jobs, for any number of readers that come and go."""

from __future__ import annotations

import asyncio

from skyrl_train.types import Metrics

KEPT = 10_000


class Feed:
    """Records are numbered from 1; the last KEPT are remembered."""

    def __init__(self) -> None:
        self._records: list[Metrics] = []
        self._first = 1
        self._more = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest record, 0 before the first."""
        return self._first + len(self._records) - 1

    def add(self, record: Metrics) -> None:
        self._records.append(record)
        if len(self._records) > KEPT:
            del self._records[0]
            self._first += 1
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, number: int, patience_s: float) -> tuple[int, list[Metrics]]:
        """(number of the newest record, the records after `number`); empty if none comes in time."""
        more = self._more
        if self.last <= number:
            try:
                await asyncio.wait_for(more.wait(), patience_s)
            except TimeoutError:
                return max(number, self.last), []
        return self.last, self._records[max(0, number + 1 - self._first) :]
