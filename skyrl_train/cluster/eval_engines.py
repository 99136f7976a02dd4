"""Engines that are reserved for evaluations beside training."""

from __future__ import annotations

from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.weight_sync import WeightSync
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.types import Generate


class EvalEngines:
    """Engines whose weights change only between two evaluations, so that every sample of one is of the same version."""

    def __init__(self, pool: EnginePool, policy: PolicyGroup, settings: GeneratorConfig) -> None:
        self._pool, self._sync = pool, WeightSync(policy, pool, settings, "evaluation")
        self.generate: Generate = pool.generate
        pool.restore = self._restore

    async def start(self) -> None:
        await self._pool.start()

    async def load(self) -> None:
        """Send them the policy's current weights, which must not change during that time.

        The connection is closed afterwards: its buffers and communicators would take memory from the updates.
        Raises: RemoteFailed if no engine is left.
        """
        await self._sync.publish(())
        await self._sync.senders.disconnect()

    async def _restore(self) -> None:
        """Send the weights to the replacement of all these engines."""
        await self._sync.restore()
        await self._sync.senders.disconnect()

    async def shutdown(self) -> None:
        await self._pool.shutdown()
