"""Weight sync: sends the policy's weights to every engine, verifies them there, and has them served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.senders import Senders
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.types import Group
from skyrl_train.weight_sync.control import SyncCheckFailed
from skyrl_train.weight_sync.send_report import SendReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncResult:
    num_bytes: int
    seconds: float
    """From pausing the engines to their resuming."""
    begin_s: float
    """Seconds of pausing and opening the update, in which senders may already fill buckets."""
    finish_s: float
    """Seconds of comparing digests, closing the update and resuming."""
    reports: tuple[SendReport, ...]
    """One report per pipeline stage."""


class Check(Protocol):
    """Periodic comparison of engine and trainer on the same samples."""

    def is_due(self, sync: int) -> bool:
        """Syncs count from 1."""

    def has_samples(self, groups: Sequence[Group]) -> bool:
        """Whether there are samples to compare on, these or earlier ones."""

    async def expect(self, policy: PolicyGroup, groups: Sequence[Group]) -> Any:
        """Compute the trainer's logprobs; the policy is on its devices."""

    async def compare(self, engines: EnginePool, expected: Any) -> None:
        """Raises: SyncCheckFailed if an engine, which must be able to generate, computes something else."""


class WeightSync:
    """Sends the policy's weights to every engine, and again to the remaining ones if one fails."""

    def __init__(
        self, policy: PolicyGroup, engines: EnginePool, settings: GeneratorConfig, purpose: str = "training"
    ) -> None:
        """Args: purpose: of the engines; the ranks have one sender for each."""
        self._policy, self._engines = policy, engines
        self.check: Check | None = None
        self.senders = Senders(policy, engines, settings, purpose)
        self._waits_for_requests = settings.pause_mode == "wait"
        self._num_syncs = 0
        self._check_is_due = False
        engines.restore = self.restore

    async def publish(self, groups: Sequence[Group]) -> SyncResult:
        """Send the weights, and where a check is due compare the logprobs of samples that were just generated.
        Raises: RemoteFailed, SyncCheckFailed; the engines then stop serving.
        """
        result, expected = await self.send(groups)
        await self.verify(expected)
        return result

    async def send(self, groups: Sequence[Group]) -> tuple[SyncResult, Any]:
        """First half of `publish`, for which the policy must be on its devices: send, and compute the trainer's side of
        a check, None if none is due. A check stays due until it was made.
        """
        self._num_syncs += 1
        result = await self._send_to_all()
        if self.check is None:
            return result, None
        self._check_is_due |= self.check.is_due(self._num_syncs)
        if not self._check_is_due:
            return result, None
        if not self.check.has_samples(groups):
            log.info("the comparison of logprobs is postponed: there are no samples yet")
            return result, None
        return result, await self.check.expect(self._policy, groups)

    async def verify(self, expected: Any) -> None:
        """Second half of `publish`, for which the engines must be able to generate. Raises: like `publish`."""
        while expected is not None:
            assert self.check is not None
            if not self._engines.updated:  # never on shared devices, where engines are not restarted
                await self._send_to_all()
            before = self._engines.num_changes
            try:
                await self.check.compare(self._engines, expected)
                self._check_is_due = False
                return
            except SyncCheckFailed:
                try:
                    await self._engines.pause()
                except RemoteFailed as error:
                    log.error("engines with other weights than the trainer could not be paused: %s", error)
                raise
            except RemoteFailed as error:
                await self._drop_blamed(error, before, "the comparison of logprobs")

    async def restore(self) -> None:
        """Send the weights to a replacement that was started after all engines had died, after an update that runs."""
        await self._engines.admit_replacements()  # before the locks: other engines' syncs do not wait for its start
        async with self._policy.weights_lock, self._policy.sync_lock:
            if self._engines.router.is_holding:  # else a running sync has provided an engine
                await self._repeat_until_sent()

    async def _send_to_all(self) -> SyncResult:
        async with self._policy.sync_lock:
            return await self._repeat_until_sent()

    async def _repeat_until_sent(self) -> SyncResult:
        """Terminates, because every failed round costs an engine and replacements are limited."""
        while True:
            await self._engines.admit_replacements()
            before = self._engines.num_changes
            try:
                return await self.send_once()
            except RemoteFailed as error:
                await self._drop_blamed(error, before, "the weight sync")

    async def _drop_blamed(self, error: RemoteFailed, before: int, what: str) -> None:
        """Raises: the error if no engine died of it."""
        names = await self._engines.drop_failed(error, before)
        log.error("%s failed (%s); dropped %s, retrying", what, error, names)

    async def send_once(self) -> SyncResult:
        """Send the current weights to the engines that are up and have them served as the current version.

        Reconnects if an engine or rank was replaced since the last sync, or that sync failed.
        Raises: RemoteFailed; no engine waits for a sender then, and those that failed are paused.
        """
        version = self._policy.versions.give()
        # Not after a failure, when an engine may still expect the last update, and not if pausing waits for requests,
        # which can take longer than a sender's deadline.
        at_once = self.senders.are_connected and not self._waits_for_requests
        try:
            if not self.senders.are_connected:
                await self.senders.connect()
            return await self._send(version, at_once=at_once)
        except BaseException:
            await self.senders.disconnect()
            raise

    async def _send(self, policy_version: int, *, at_once: bool) -> SyncResult:
        """Args: at_once: have the senders fill their first buckets while the engines pause."""
        engines, started = self._engines, time.perf_counter()
        beginning = asyncio.ensure_future(self._begin())
        if at_once:
            await asyncio.sleep(0)  # the engines are asked first
        if not at_once or beginning.done():
            await beginning
        try:
            reports = await self.senders.send()
        finally:
            begun = await beginning  # whose error is the cause of the senders'
        digests: dict[str, int] = {}
        for report in reports:
            digests |= report.digests
        assert len(digests) == sum(len(report.digests) for report in reports), "two stages sent the same tensor"
        sent = time.perf_counter()
        await engines.finish_weight_update(policy_version, digests)
        ended = time.perf_counter()
        num_bytes = sum(report.num_bytes for report in reports)
        return SyncResult(num_bytes, ended - started, begun - started, ended - sent, tuple(reports))

    async def _begin(self) -> float:
        """Returns: the time when all engines had begun. Raises: RemoteFailed, at once if one was admitted while the
        senders connected: it would be told that it has the weights, and has received none.
        """
        if not self.senders.are_connected:
            raise RemoteFailed("an engine or the policy was replaced while the weight sync connected")
        await self._engines.begin_weight_update()
        return time.perf_counter()
