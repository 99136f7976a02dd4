"""New weights reach the engines, and now and then it is checked that engine and trainer compute the same."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.policy_group import PolicyGroup, SyncResult
from skyrl_train.trainer.sync_check import Expected, SyncCheck
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
        result, expected = await self.send(groups)
        await self.verify(expected)
        return result

    async def send(self, groups: Sequence[Group]) -> tuple[SyncResult, Expected | None]:
        """The first half of `publish`, for which the policy must be on its devices: send, and where a check is due
        compute what `verify` compares with."""
        self._num_syncs += 1
        result = await self._policy.send_weights(self._engines, self._dtype_name)
        due = self._check.is_due(self._num_syncs)
        return result, await self._check.expect(self._policy, groups) if due else None

    async def verify(self, expected: Expected | None) -> None:
        """The second half, for which the engines must be able to generate."""
        if expected is not None:
            await self._check.compare(self._engines, expected)
