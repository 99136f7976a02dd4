"""vLLM's weight updates and pauses over HTTP, and the differences between servers of 0.26 to 0.33.

    0.26  the oldest supported version
    0.27  /update_weight_version
    0.28  the backend `nccl` receives the packing of tensors once, at init; before, in each update
    0.32  /shutdown_weight_transfer_engine

Routes are looked up in the server's openapi.json; if it is hidden (--disable-fastapi-docs), the version decides. All
but /v1, /health and /version need VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.engines.remote.client import ServerClient, ServerError
from skyrl_train.engines.remote.facts import ServerFacts
from skyrl_train.weight_sync.control import ControlMessage

PACKED_AT_INIT_SINCE = (0, 28)
PACKED_BUFFERS = 2
"""Receive buffers of the server; vLLM's default."""


class HttpLifecycle:
    """The calls to one server, in the form that its version understands."""

    def __init__(self, client: ServerClient, facts: ServerFacts, timeout_s: float) -> None:
        self._client, self.facts, self._timeout_s = client, facts, timeout_s
        self._packing: dict[str, Any] = {}
        self._released = False

    @property
    def is_stock(self) -> bool:
        """Whether the server receives weights through vLLM's own NCCL backend."""
        return self.facts.backend == "nccl"

    async def pause(self, mode: str) -> None:
        await self._post("/pause", mode=mode, clear_cache="true")

    async def resume(self) -> None:
        await self._post("/resume")

    async def reset_prefix_cache(self) -> bool:
        answer = await self._post("/reset_prefix_cache")
        return bool(answer["success"])

    async def init(self, info: ControlMessage) -> None:
        """Connect the server's workers to a sender; returns when all have joined."""
        if not self._released and "/shutdown_weight_transfer_engine" in self.facts.routes:
            await self._post("/shutdown_weight_transfer_engine")  # connections of an earlier run
        self._released = True
        await self._post("/init_weight_transfer_engine", {"init_info": self._init_info(info)})

    async def start(self) -> None:
        await self._post("/start_weight_update")

    async def update(self, message: ControlMessage) -> None:
        """Returns when all workers have loaded the tensors of the message."""
        await self._post("/update_weights", {"update_info": self._update_info(message)})

    async def finish(self) -> None:
        # An optional label since 0.27; {} is valid in all versions, some refuse an empty body.
        await self._post("/finish_weight_update", {})

    async def close_failed_update(self) -> None:
        """End an unfinished update of this or another client."""
        if not self.is_stock:
            await self.rpc("skyrl_close_update")
            return
        try:
            await self.finish()
        except ServerError as error:
            if "without a matching start" not in str(error):
                raise
            # After an update that failed while receiving, vLLM (0.26 to 0.33) counts the tensors of incomplete layers
            # towards the next update and skips its last ones: a model with experts then serves a mixture, without an
            # error. An empty update closes these layers.
            await self.start()
            await self.finish()

    async def set_version(self, policy_version: int) -> None:
        """Label the weights; 0.26 has no labels."""
        if "/update_weight_version" in self.facts.routes:
            await self._post("/update_weight_version", {"new_version": str(policy_version)})

    async def rpc(self, method: str) -> list[Any]:
        """Results of a worker extension's method, per worker."""
        answer = await self._post("/collective_rpc", {"method": method})
        return [] if answer is None else answer["results"]

    async def _post(self, path: str, body: Any = None, **query: str) -> Any:
        return await self._client.post(path, body, self._timeout_s, **query)

    def _init_info(self, info: ControlMessage) -> dict[str, Any]:
        if not self.is_stock:
            return {"info": info}
        group = {name: info[name] for name in ("master_address", "master_port", "rank_offset", "world_size")}
        packing = {
            "packed": True,
            "packed_buffer_size_bytes": info["bucket_bytes"],
            "packed_num_buffers": PACKED_BUFFERS,
        }
        if self.facts.number >= PACKED_AT_INIT_SINCE:
            return group | packing
        self._packing = packing
        return group

    def _update_info(self, message: ControlMessage) -> dict[str, Any]:
        if not self.is_stock:
            return {"message": message}
        return {name: message[name] for name in ("names", "dtype_names", "shapes")} | self._packing
