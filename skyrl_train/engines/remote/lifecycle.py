"""vLLM's weight updates and pauses over HTTP, and what differs between servers of 0.26 to 0.33.

    version  what changed for a client
    < 0.21   no start/finish: every update was a whole one                                        refused
    0.21+    the bracket start, update ..., finish; until 0.24 start takes `is_checkpoint_format`  refused below 0.26
    0.26     the first that the engines of this project support too
    0.27     /update_weight_version, /weight_info
    0.28     the backend `nccl` is told once, at init, how tensors are packed; before that at each update
    0.32     /shutdown_weight_transfer_engine

Routes are probed in the server's openapi.json; where it is hidden (--disable-fastapi-docs) the version decides. All of
them but /v1, /health and /version need VLLM_SERVER_DEV_MODE=1.
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
    """The calls of one server, in the form that its version understands."""

    def __init__(self, client: ServerClient, facts: ServerFacts, timeout_s: float) -> None:
        self._client, self._facts, self._timeout_s = client, facts, timeout_s
        self._packing: dict[str, Any] = {}
        self._released = False

    @property
    def is_stock(self) -> bool:
        """Whether the server receives weights through vLLM's own NCCL backend."""
        return self._facts.backend == "nccl"

    async def pause(self, mode: str) -> None:
        await self._post("/pause", mode=mode, clear_cache="true")

    async def resume(self) -> None:
        await self._post("/resume")

    async def reset_prefix_cache(self) -> bool:
        answer = await self._post("/reset_prefix_cache")
        return bool(answer["success"])

    async def init(self, info: ControlMessage) -> None:
        """Connect the server's workers to a sender; returns when all have joined."""
        if not self._released and "/shutdown_weight_transfer_engine" in self._facts.routes:
            await self._post("/shutdown_weight_transfer_engine")  # what an earlier run left connected
        self._released = True
        await self._post("/init_weight_transfer_engine", {"init_info": self._init_info(info)})

    async def start(self) -> None:
        # No body: before 0.25 it had one, and from then on it is not read.
        await self._post("/start_weight_update")

    async def update(self, message: ControlMessage) -> None:
        """Returns when all workers have taken in what the message announces."""
        await self._post("/update_weights", {"update_info": self._update_info(message)})

    async def finish(self) -> None:
        # The body is an optional label since 0.27; {} is valid everywhere, no body is refused by some versions.
        await self._post("/finish_weight_update", {})

    async def close_broken_update(self) -> None:
        """End an update that was begun and not finished, by this client or by another one."""
        if not self.is_stock:
            await self.rpc("skyrl_close_update")
            return
        try:
            await self.finish()
        except ServerError as error:
            if "without a matching start" not in str(error):
                raise
            # Of an update that failed while it received, vLLM (0.26 to 0.33) leaves layers open that had got a part of
            # their tensors. The next update would count those in, and load none of the last ones: with experts it
            # then serves the mixture and says nothing. An update of nothing closes them.
            await self.start()
            await self.finish()

    async def set_version(self, policy_version: int) -> None:
        """Label the weights; 0.26 has no such label."""
        if "/update_weight_version" in self._facts.routes:
            await self._post("/update_weight_version", {"new_version": str(policy_version)})

    async def rpc(self, method: str) -> list[Any]:
        """A method of the worker extension, on every worker."""
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
        if self._facts.number >= PACKED_AT_INIT_SINCE:
            return group | packing
        self._packing = packing
        return group

    def _update_info(self, message: ControlMessage) -> dict[str, Any]:
        if not self.is_stock:
            return {"message": message}
        return {name: message[name] for name in ("names", "dtype_names", "shapes")} | self._packing
