"""New weights reach the engines, and now and then it is checked that engine and trainer compute the same."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.policy_group import PolicyGroup, SyncResult
from skyrl_train.trainer.sync_check import SyncCheck
from skyrl_train.types import Group


class Publisher:
    """Sends the policy's weights to every engine."""

    def __init__(self, policy: PolicyGroup, engines: EngineGroup, dtype_name: str, check: SyncCheck) -> None:
        """Args: dtype_name is the engines'; the bytes travel in it."""
        self._policy, self._engines, self._dtype_name, self._check = policy, engines, dtype_name, check
        self._num_syncs = 0

    async def publish(self, groups: Sequence[Group]) -> SyncResult:
        """Send the weights, and where a check is due compare the logprobs of samples that were just drawn.

        Raises: RemoteFailed, SyncCheckFailed; the engines then serve nothing more.
        """
        self._num_syncs += 1
        result = await self._policy.send_weights(self._engines, self._dtype_name)
        if self._check.is_due(self._num_syncs):
            await self._check.run(self._policy, self._engines, groups)
        return result
