"""Who holds device memory when, and how new weights reach the engines.

`Dedicated`: policy, reference and engines have devices (or, without GPUs, processes) of their own, so nothing has to
move.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.policy_group import PolicyGroup, SyncResult
from skyrl_train.trainer.sync_check import SyncCheck
from skyrl_train.types import Group


class Dedicated:
    """Every process keeps its memory for the whole run."""

    def __init__(self, policy: PolicyGroup, engines: EngineGroup, dtype_name: str, check: SyncCheck) -> None:
        self._policy, self._engines, self._dtype_name, self._check = policy, engines, dtype_name, check
        self._num_syncs = 0

    async def for_rollout(self) -> None:
        """Engines: weights and KV cache are on their devices already."""

    async def for_reference(self) -> None:
        """The reference is on its devices already."""

    async def for_training(self) -> None:
        """Policy weights and optimizer are on their devices already."""

    async def sync_weights(self, groups: Sequence[Group]) -> SyncResult:
        """Send the policy's weights to the engines, and at times compare the logprobs of samples that were just drawn.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing more.
        """
        self._num_syncs += 1
        result = await self._policy.send_weights(self._engines, self._dtype_name)
        if self._check.is_due(self._num_syncs):
            await self._check.run(self._policy, self._engines, groups)
        return result
