"""Comparison of engines and trainer before the first update of a process, when no sync has been compared yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.trainer.agreement.sync_check import Scores, SyncCheck
from skyrl_train.types import Group

log = logging.getLogger(__name__)


class FirstCheck:
    """Scores the first samples with every engine while engines are awake, and with the trainer once it is loaded."""

    def __init__(self, check: SyncCheck, policy: PolicyGroup, engines: EnginePool) -> None:
        self._check, self._policy, self._engines = check, policy, engines

    async def scores(self, groups: Sequence[Group]) -> Scores | None:
        """First half: the engines must be able to generate. None once they were compared."""
        if self._check.has_compared:
            return None
        before = self._engines.num_changes
        try:
            return await self._check.scores(self._engines, groups)
        except RemoteFailed as error:
            await self._engines.drop_failed(error, before)
            log.warning("an engine failed before the first update and is compared after its first sync: %s", error)
            return None

    async def judge(self, scores: Scores | None, groups: Sequence[Group]) -> None:
        """Second half: the policy must be on its devices. Raises: SyncCheckFailed."""
        if scores is not None:
            expected = await self._check.expect(self._policy, groups)
            self._check.judge(expected, scores, "before the first update")
