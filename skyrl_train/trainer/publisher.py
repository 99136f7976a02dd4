"""Publishing of an updated policy to the engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.residency import Residency
from skyrl_train.types import Group, Metrics


class Publisher:
    """Has the engines serve the new weights, verified, after an update."""

    def __init__(
        self, residency: Residency, timers: Timers, before_sync: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Args: before_sync: awaited while the updated policy is on its devices."""
        self._residency, self._timers, self._before_sync = residency, timers, before_sync

    async def publish(self, groups: Sequence[Group] = ()) -> Metrics:
        """Returns `perf/*` of the sync. Args: groups: samples on which engines and trainer may be compared.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing.
        """
        if self._before_sync is not None:
            await self._before_sync()
        with self._timers("sync_weights"):
            sync = await self._residency.sync_weights(groups)
        return {"perf/sync_gb_per_s": sync.num_bytes / sync.seconds / 1e9}
