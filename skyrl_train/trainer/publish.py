"""New weights reach the engines, and now and then it is checked that engine and trainer compute the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.policy_group import PolicyGroup, SyncResult
from skyrl_train.trainer.sync_check import Expected, SyncCheck
from skyrl_train.types import Group

log = logging.getLogger(__name__)


class Publisher:
    """Sends the policy's weights to every engine, and again to those that are left when one is lost meanwhile."""

    def __init__(self, policy: PolicyGroup, engines: EngineGroup, dtype_name: str, check: SyncCheck) -> None:
        """Args: dtype_name is the engines'; the bytes travel in it."""
        self._policy, self._engines, self._dtype_name, self._check = policy, engines, dtype_name, check
        self._num_syncs = 0
        self._lock = asyncio.Lock()
        engines.when_all_are_lost(self.restore)

    async def publish(self, groups: Sequence[Group]) -> SyncResult:
        """Send the weights, and where a check is due compare the logprobs of samples that were just drawn.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing more.
        """
        result, expected = await self.send(groups)
        await self.verify(expected)
        return result

    async def send(self, groups: Sequence[Group]) -> tuple[SyncResult, Expected | None]:
        """The first half of `publish`, for which the policy must be on its devices: send, and where a check is due
        compute what `verify` compares with."""
        self._num_syncs += 1
        result = await self._send()
        due = self._check.is_due(self._num_syncs) and self._check.has_samples(groups)
        return result, await self._check.expect(self._policy, groups) if due else None

    async def verify(self, expected: Expected | None) -> None:
        """The second half, for which the engines must be able to generate."""
        while expected is not None:
            try:
                await self._check.compare(self._engines, expected)
                return
            except RemoteFailed as error:
                await self._go_on_without_the_lost(error, "the comparison of logprobs")
                if not self._engines.actors:
                    await self._send()

    async def restore(self) -> None:
        """Give the same weights to an engine that was started when all were lost, so that it answers in their place."""
        await self._send()

    async def _send(self) -> SyncResult:
        """Ends, for every round loses an engine and each of them is replaced only so many times."""
        async with self._lock:
            while True:
                await self._engines.admit_replacements()
                try:
                    return await self._policy.send_weights(self._engines, self._dtype_name)
                except RemoteFailed as error:
                    await self._go_on_without_the_lost(error, "the weight sync")

    async def _go_on_without_the_lost(self, error: RemoteFailed, what: str) -> None:
        """Raises: the error if no engine is to blame for it."""
        lost = await self._engines.drop_lost()
        if not lost:
            raise error
        log.error("%s broke off with %s (%s); it is repeated without", what, ", ".join(lost), error)
