"""New weights reach the engines, and now and then it is checked that engine and trainer compute the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.engine_group import EngineGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.weight_way import SyncResult
from skyrl_train.trainer.agreement.sync_check import Expected, SyncCheck, SyncCheckFailed
from skyrl_train.types import Group

log = logging.getLogger(__name__)


class Publisher:
    """Sends the policy's weights to every engine, and again to those that are left when one is lost meanwhile."""

    def __init__(self, policy: PolicyGroup, engines: EngineGroup, dtype_name: str, check: SyncCheck) -> None:
        """Args: dtype_name is the engines'; the bytes travel in it."""
        self._policy, self._engines, self._dtype_name, self._check = policy, engines, dtype_name, check
        self._num_syncs = 0
        self._check_is_owed = False
        self._lock = asyncio.Lock()
        engines.requests.when_all_are_lost(self.restore)

    async def publish(self, groups: Sequence[Group]) -> SyncResult:
        """Send the weights, and where a check is due compare the logprobs of samples that were just drawn.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing more.
        """
        result, expected = await self.send(groups)
        await self.verify(expected)
        return result

    async def send(self, groups: Sequence[Group]) -> tuple[SyncResult, Expected | None]:
        """The first half of `publish`, for which the policy must be on its devices: send, and where a check is due
        compute what `verify` compares with. A check stays due until it was made."""
        self._num_syncs += 1
        result = await self._send()
        self._check_is_owed |= self._check.is_due(self._num_syncs)
        if not self._check_is_owed:
            return result, None
        if not self._check.has_samples(groups):
            log.info("the comparison of logprobs waits for the first samples to compare on")
            return result, None
        return result, await self._check.expect(self._policy, groups)

    async def verify(self, expected: Expected | None) -> None:
        """The second half, for which the engines must be able to generate.

        Raises: as `publish`.
        """
        while expected is not None:
            before = self._engines.members.num_changes
            try:
                await self._check.compare(self._engines, expected)
                self._check_is_owed = False
                return
            except SyncCheckFailed:
                try:
                    await self._engines.pause()
                except RemoteFailed as error:
                    log.error("engines that hold other weights than the trainer could not be paused: %s", error)
                raise
            except RemoteFailed as error:
                await self._go_on_without_the_lost(error, before, "the comparison of logprobs")
                if not self._engines.members.actors:
                    await self._send()

    async def restore(self) -> None:
        """Give the same weights to an engine that was started when all were lost, so that it answers in their place.

        To be called while requests wait, in a phase in which the policy does not change.
        """
        async with self._lock:
            if self._engines.requests.are_held:  # else a sync that was under way has given them an engine
                await self._repeat_until_sent()

    async def _send(self) -> SyncResult:
        async with self._lock:
            return await self._repeat_until_sent()

    async def _repeat_until_sent(self) -> SyncResult:
        """Ends, for every round loses an engine and each of them is replaced only so many times."""
        while True:
            await self._engines.members.admit_replacements()
            before = self._engines.members.num_changes
            try:
                return await self._policy.send_weights(self._dtype_name)
            except RemoteFailed as error:
                await self._go_on_without_the_lost(error, before, "the weight sync")

    async def _go_on_without_the_lost(self, error: RemoteFailed, before: int, what: str) -> None:
        """Args: before: the `num_changes` of the engines when it began.

        Raises: the error if no engine is to blame for it.
        """
        lost = await self._engines.members.drop_lost()
        if self._engines.members.num_changes == before:
            raise error
        names = ", ".join(lost) or "an engine that was lost meanwhile"
        log.error("%s broke off with %s (%s); it is repeated without", what, names, error)
