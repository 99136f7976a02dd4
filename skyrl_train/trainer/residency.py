"""Who holds device memory when.

`Dedicated`: policy, reference and engines have devices (or, without GPUs, processes) of their own, so nothing has to
move.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.policy_group import SyncResult
from skyrl_train.trainer.publish import Publisher
from skyrl_train.types import Group


class Dedicated:
    """Every process keeps its memory for the whole run."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def for_rollout(self) -> None:
        """Engines: weights and KV cache are on their devices already."""

    async def for_reference(self) -> None:
        """The reference is on its devices already."""

    async def for_training(self) -> None:
        """Policy weights and optimizer are on their devices already."""

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        """Raises: what `Publisher.publish` raises."""
        return await self._publisher.publish(groups)
