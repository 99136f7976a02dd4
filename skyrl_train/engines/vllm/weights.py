"""Weight updates of a running engine, and whether its weights are complete."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from skyrl_train.engines.vllm import compat
from skyrl_train.engines.vllm.core import Core
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError
from skyrl_train.weight_sync.digest import check_reports

if TYPE_CHECKING:
    from skyrl_train.engines.vllm.worker.adapter_slots import EveryRequest


class Weights:
    """Where adapters are served, updates bring adapters alone, and `bind_adapter` must precede the first request."""

    def __init__(self, core: Core, served_model_name: str, adapter: EveryRequest | None) -> None:
        self._core, self._name, self._adapter = core, served_model_name, adapter
        self._lock = asyncio.Lock()
        self._senders = set[str]()
        self._loaded = set[str]()
        """Senders of this update whose weights were loaded."""
        self._closing: asyncio.Task[tuple[list[Any], bool]] | None = None
        """What `_close` returns, from when all have been."""
        self.are_complete = True
        """False from the start of an update to its end, and after `drop`."""

    @property
    def are_adapters(self) -> bool:
        return self._adapter is not None

    async def connect(self, info: ControlMessage) -> None:
        """Returns when the sender has answered; for a broadcast, when all receivers have joined."""
        request = WeightTransferInitRequest(init_info={"info": info})
        await self._core.call(self._core.llm.init_weight_transfer_engine(request), "connecting the weight sync")
        self._senders.add(info["sender"])

    async def start(self) -> None:
        self._loaded, self._closing = set(), None
        if not self.are_complete:
            await self.close_failed()
        self.are_complete = False
        await self._core.call(self._core.llm.start_weight_update(), "starting a weight update")

    async def load(self, message: ControlMessage) -> None:
        """Receive and load the tensors of one sender; senders are served in the order of their messages."""
        sender = message["sender"]
        async with self._lock:
            request = WeightTransferUpdateRequest(update_info={"message": message})
            try:
                await self._core.call(self._core.llm.update_weights(request), f"loading the weights of {sender}")
            except BaseException:
                self._senders.clear()  # a failed update ends the connections to all of them
                raise
            self._loaded.add(sender)
            if self._loaded == self._senders:  # at once: the core need not wait until the driver knows of it
                self._closing = asyncio.ensure_future(self._close())
                self._closing.add_done_callback(_note_error)

    async def finish(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """Check what was received, and make vLLM use it under its version; the caller sets `are_complete`.
        Raises: WeightSyncError, also if a cached prefix of the old weights remains.
        """
        closed = self._close() if self._closing is None else self._closing
        version = self._core.call(
            compat.set_weight_version(self._core.llm, policy_version), "setting the served version"
        )
        (workers, is_reset), _ = await asyncio.gather(closed, version)
        check_reports(workers, sent_digests, "engine")
        if self._adapter is not None:
            await self.bind_adapter(policy_version, first=False)
        if not is_reset:
            raise WeightSyncError("the engine did not reset its prefix cache: a running request holds parts of it")

    async def _close(self) -> tuple[list[Any], bool]:
        """Returns: each worker's report, and whether the prefix cache is empty."""
        # At once, which saves round trips: nothing runs that could fill the cache with the old weights again.
        _, workers, is_reset = await asyncio.gather(
            self._core.call(self._core.llm.finish_weight_update(), "finishing a weight update"),
            self._core.ask_workers("skyrl_sync_report", "checking the weights"),
            self._core.call(self._core.llm.reset_prefix_cache(), "resetting the prefix cache"),
        )
        return workers, is_reset

    async def bind_adapter(self, policy_version: int, *, first: bool) -> None:
        """Args: first: bind the adapter that changes nothing instead of the last one received.
        Raises: WeightSyncError if the slots of a worker do not hold the complete adapter.
        """
        assert self._adapter is not None
        for faults in await self._core.ask_workers("skyrl_bind_adapter", "binding the adapter", first):
            if faults:
                raise WeightSyncError("the engine cannot serve the adapter: " + "; ".join(faults))
        self._adapter.serve(f"{self._name}@{policy_version}")

    async def close_failed(self) -> None:
        """Close an update that failed, if there is one."""
        await self._core.ask_workers("skyrl_close_update", "closing a failed weight update")

    async def drop(self) -> None:
        """To be called before the weights' memory is freed; saves the tensors that no update brings."""
        self.are_complete = False
        await self._core.ask_workers("skyrl_keep_unsynced", "saving tensors that no update brings")

    async def restore(self) -> None:
        """To be called when that memory is mapped again."""
        await self._core.ask_workers("skyrl_restore_unsynced", "restoring tensors that no update brings")


def _note_error(task: asyncio.Task[Any]) -> None:
    """Retrieve an error that `finish` does not raise if another engine has failed: asyncio would complain."""
    if not task.cancelled():
        task.exception()
