"""Publishing of an updated policy to the engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.residency import Residency
from skyrl_train.types import Group, Metrics


@dataclass(frozen=True, slots=True)
class Publisher:
    """Has the engines serve the new weights, verified, after an update."""

    residency: Residency
    timers: Timers
    before_sync: Callable[[], Awaitable[None]] | None = None
    """Awaited while the updated policy is on its devices."""

    async def publish(self, groups: Sequence[Group] = ()) -> Metrics:
        """Returns `perf/*` of the sync. Args: groups: samples on which engines and trainer may be compared.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing.
        """
        if self.before_sync is not None:
            await self.before_sync()
        with self.timers("sync_weights"):
            sync = await self.residency.sync_weights(groups)
        return {
            "perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9,
            "perf/sync_overhead_s": sync.begin_s + sync.finish_s,
        }
