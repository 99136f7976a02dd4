"""The weights of a running engine on their way in, and whether the engine holds whole ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skyrl_train.engines.sync_report import SyncReport, checked_report
from skyrl_train.engines.vllm.core import Core
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

if TYPE_CHECKING:
    from skyrl_train.engines.vllm.worker.adapter_slots import EveryRequest

# vllm_versions is imported where it is called: vLLM reads the environment, which the engine sets, when it is imported.


class Weights:
    """Where adapters are served these alone are updated; then `bind_adapter` must come before the first request."""

    def __init__(self, core: Core, served_model_name: str, adapter: EveryRequest | None) -> None:
        self._core, self._name, self._adapter = core, served_model_name, adapter
        self._lock = asyncio.Lock()
        self.are_whole = True
        """False from the start of an update to its end, and after `drop`."""

    @property
    def are_served(self) -> bool:
        """Whether requests get the adapter, where there is one."""
        return self._adapter is None or self._adapter.is_bound

    @property
    def are_adapters(self) -> bool:
        """Whether updates bring adapters and leave the base model as it is."""
        return self._adapter is not None

    async def connect(self, info: ControlMessage) -> None:
        """Returns when the sender has answered; of a broadcast when everybody has joined."""
        from skyrl_train.engines.vllm import compat as vllm_versions

        connected = vllm_versions.init_weight_transfer(self._core.llm, {"info": info})
        await self._core.call(connected, "connecting the weight sync")

    async def start(self) -> None:
        """An update that broke off before is given up."""
        if not self.are_whole:
            await self.close_broken()
        self.are_whole = False
        await self._core.call(self._core.llm.start_weight_update(), "starting a weight update")

    async def take_in(self, message: ControlMessage) -> None:
        """All that one sender sends; messages are worked off in the order in which they come."""
        from skyrl_train.engines.vllm import compat as vllm_versions

        async with self._lock:
            update = vllm_versions.update_weights(self._core.llm, {"message": message})
            await self._core.call(update, f"taking in the weights of {message['sender']}")

    async def finish(self, policy_version: int, sent_digests: dict[str, int]) -> SyncReport:
        """Check what came, and have vLLM use it and name it; whole weights are there when `are_whole` is set.

        Raises: WeightSyncError, also if a cached prefix of the old weights remains.
        """
        from skyrl_train.engines.vllm import compat as vllm_versions

        workers = await self._core.ask_workers("skyrl_sync_report", "checking the weights")
        report = checked_report(policy_version, workers, sent_digests, "engine")
        await self._core.call(self._core.llm.finish_weight_update(), "finishing a weight update")
        if self._adapter is not None:
            await self.bind_adapter(policy_version, first=False)
        is_reset, _ = await asyncio.gather(
            self._core.call(self._core.llm.reset_prefix_cache(), "resetting the prefix cache"),
            self._core.call(
                vllm_versions.set_weight_version(self._core.llm, policy_version), "setting the served version"
            ),
        )
        if not is_reset:
            raise WeightSyncError("the engine did not reset its prefix cache: a running request holds parts of it")
        return report

    async def bind_adapter(self, policy_version: int, *, first: bool) -> None:
        """Args: first: the adapter that changes nothing, not the one that came last.

        Raises: WeightSyncError if the slots of a worker do not hold the whole adapter.
        """
        assert self._adapter is not None
        for bound in await self._core.ask_workers("skyrl_bind_adapter", "binding the adapter", first):
            if bound["faults"]:
                raise WeightSyncError("the engine cannot serve the adapter: " + "; ".join(bound["faults"]))
        self._adapter.serve(f"{self._name}@{policy_version}")

    async def close_broken(self) -> None:
        await self._core.ask_workers("skyrl_close_update", "closing a broken weight update")

    async def drop(self) -> None:
        """To be called before their memory is freed for good; keeps what no update brings."""
        self.are_whole = False
        await self._core.ask_workers("skyrl_keep_unsynced", "saving what no update brings")

    async def restore(self) -> None:
        """What `drop` kept, when their memory is there again."""
        await self._core.ask_workers("skyrl_restore_unsynced", "restoring what no update brings")
