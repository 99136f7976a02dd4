"""A running vLLM server as an `Engine`.

The server's weights are unknown when a run connects (those of an earlier run, half an update), so the run sends a
complete update before the first request. Servers of 0.26 to 0.33 differ:

    0.26  the oldest supported version
    0.27  /update_weight_version
    0.28  the backend `nccl` receives the packing of tensors once, at init; before, in each update
    0.32  /shutdown_weight_transfer_engine

All routes but /v1, /health and /version need VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_train.engines.protocol import EngineDeadError, EngineFacts
from skyrl_train.engines.remote.client import ServerClient, ServerError, ServerUnreachableError
from skyrl_train.engines.remote.facts import ServerFacts, check_server, check_tokenizer, probe
from skyrl_train.engines.remote.scoring import prompt_logprobs
from skyrl_train.engines.settings import EngineSettings, PauseMode, room_to_answer, still_running
from skyrl_train.engines.stop_strings import has_special_token
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError
from skyrl_train.weight_sync.digest import check_reports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONNECTIONS = 512
"""Concurrent requests to the server; others wait here. Each is an open socket, of which a process may have 1024."""
PACKED_AT_INIT_SINCE = (0, 28)
PACKED_BUFFERS = 2
"""Receive buffers of the server; vLLM's default."""


class RemoteEngine:
    """Contacts the server in `start` first. The server's device is not shared, so it never sleeps."""

    _facts: ServerFacts
    _tokenizer: PreTrainedTokenizerBase
    """Both are set by `start`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        # Two pools: control calls must not wait behind requests.
        self._control = ServerClient(settings.url, settings.api_key, max_connections=32)
        self._generation = ServerClient(settings.url, settings.api_key, MAX_CONNECTIONS)
        self._policy_version = 0
        self._needs_weights = True
        self._has_released = False
        self._packing: dict[str, Any] = {}
        """What each update must say about the packing of tensors."""
        self._running = asyncio.Event()
        self._running.set()
        self._update_lock = asyncio.Lock()

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """Check that the server suits this run; what it answers before the first weight sync is not controlled.
        Raises: ServerUnreachableError; ServerUnsuitableError naming the difference and what to do about it.
        """
        self._facts = await probe(self._control, self._settings.rpc_timeout_s)
        check_server(self._facts, self._settings)
        self._tokenizer = await check_tokenizer(
            self._control, self._settings.model_path, self._settings.trust_remote_code
        )
        return EngineFacts(self._facts.num_workers)

    @property
    def _is_stock(self) -> bool:
        """Whether the server receives weights through vLLM's own NCCL backend."""
        return self._facts.backend == "nccl"

    async def ping(self, timeout_s: float) -> None:
        """A stock server is asked for its /health only."""
        answer = self._call(self._control.get("/health", timeout_s)) if self._is_stock else self._rpc("skyrl_ping")
        await asyncio.wait_for(answer, timeout_s)

    async def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Like `Engine.generate_batch`; leaving the iterator closes the connections, which aborts the requests."""
        await self._running.wait()
        bodies = [(index, self._body(token_ids, params)) for index, token_ids, params in requests]
        tasks = {asyncio.create_task(self._generate(index, body)) for index, body in bodies}
        try:
            left = tasks
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                yield [task.result() for task in done]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        return await self._call(prompt_logprobs(self._generation, prompts, self._settings.rpc_timeout_s))

    async def sleep(self, *, keep_weights: bool = False) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_kv_cache(self) -> None: ...

    async def memory(self) -> list[dict[str, float]]:
        return []

    async def pause(self, mode: PauseMode | None = None) -> None:
        self._running.clear()
        chosen: str = self._settings.generator.pause_mode if mode is None else mode
        try:
            await self._post("/pause", mode=chosen, clear_cache="true")
        except TimeoutError as error:
            if chosen != "wait":
                raise
            raise still_running(self._settings.rpc_timeout_s) from error

    async def resume(self) -> None:
        if self._needs_weights:
            raise WeightSyncError(
                f"no weight update of {self._settings.url} has completed since the run connected or since one failed: "
                "the server stays paused until one has"
            )
        await self._post("/resume")
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        """Returns when the server's workers have joined the sender."""
        if not self._has_released and "/shutdown_weight_transfer_engine" in self._facts.routes:
            await self._post("/shutdown_weight_transfer_engine")  # connections of an earlier run
        self._has_released = True
        init_info: dict[str, Any] = {"info": info}
        if self._is_stock:
            init_info = {name: info[name] for name in ("master_address", "master_port", "rank_offset", "world_size")}
            packing = {
                "packed": True,
                "packed_buffer_size_bytes": info["bucket_bytes"],
                "packed_num_buffers": PACKED_BUFFERS,
            }
            if self._facts.number >= PACKED_AT_INIT_SINCE:
                init_info |= packing
            else:
                self._packing = packing
        await self._post("/init_weight_transfer_engine", {"init_info": init_info})

    async def begin_weight_update(self) -> None:
        """Pause and expect weights; an update that failed before, also another client's, is closed."""
        await self.pause()
        if self._needs_weights:
            await self._close_failed_update()
        self._needs_weights = True
        await self._post("/start_weight_update")

    async def _close_failed_update(self) -> None:
        if not self._is_stock:
            await self._rpc("skyrl_close_update")
            return
        try:
            await self._finish()
        except ServerError as error:
            if "without a matching start" not in str(error):
                raise
            # After an update that failed while receiving, vLLM (0.26 to 0.33) counts the tensors of incomplete layers
            # towards the next update and skips its last ones: a model with experts then serves a mixture, without an
            # error. An empty update closes these layers.
            await self._post("/start_weight_update")
            await self._finish()

    async def _finish(self) -> None:
        # An optional label since 0.27; {} is valid in all versions, some refuse an empty body.
        await self._post("/finish_weight_update", {})

    async def update_weights(self, message: ControlMessage) -> None:
        """Raises: WeightSyncError with the server's error."""
        update: dict[str, Any] = {"message": message}
        if self._is_stock:
            update = {name: message[name] for name in ("names", "dtype_names", "shapes")} | self._packing
        async with self._update_lock:  # two calls at once could arrive in any order
            try:
                await self._post("/update_weights", {"update_info": update})
            except ServerError as error:
                raise WeightSyncError(
                    f"the server {self._settings.url}, which serves {self._facts.model}, could not load the weights of "
                    f"{self._settings.model_path}: {error}"
                ) from error

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """A stock server reports no digests: only the comparison of logprobs can verify its weights."""
        if not self._is_stock:
            check_reports(await self._rpc("skyrl_sync_report"), sent_digests, "server")
        await self._finish()
        if not (await self._post("/reset_prefix_cache"))["success"]:
            raise WeightSyncError("the server did not reset its prefix cache: a running request holds parts of it")
        if "/update_weight_version" in self._facts.routes:
            await self._post("/update_weight_version", {"new_version": str(policy_version)})
        self._policy_version = policy_version
        self._needs_weights = False

    async def shutdown(self) -> None:
        """Close the connections; the server keeps running, and stays paused if its weights are incomplete."""
        self._running.clear()
        await self._control.close()
        await self._generation.close()

    async def _rpc(self, method: str) -> list[Any]:
        """Results of a worker extension's method, per worker."""
        answer = await self._post("/collective_rpc", {"method": method})
        return [] if answer is None else answer["results"]

    async def _post(self, path: str, body: Any = None, **query: str) -> Any:
        return await self._call(self._control.post(path, body, self._settings.rpc_timeout_s, **query))

    async def _call(self, awaitable: Any) -> Any:
        try:
            return await awaitable
        except ServerUnreachableError as error:
            raise EngineDeadError(str(error)) from error

    async def _generate(self, index: int, body: dict[str, Any]) -> tuple[int, Generation]:
        first_version = self._policy_version  # a weight update may change it while the request runs
        answer = await self._call(self._generation.post("/v1/completions", body, None))
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise RuntimeError(f"{self._settings.url} ended a request with {choice['finish_reason']!r}")
        token_ids, text = choice["token_ids"], choice["text"]
        if not body["skip_special_tokens"]:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        generation = Generation(
            token_ids=token_ids,
            logprobs=choice["logprobs"]["token_logprobs"],
            text=text,
            stop_reason=choice["finish_reason"],
            policy_version=first_version,
        )
        return index, generation

    def _body(self, token_ids: list[int], params: SamplingParams) -> dict[str, Any]:
        """All parameters are explicit: vLLM takes others from the model's generation_config.json."""
        room = room_to_answer(len(token_ids), self._settings.max_model_len)
        return {
            "prompt": token_ids,
            "max_tokens": min(params.max_generate_length, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop": list(params.stop),
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "include_stop_str_in_output": True,
            "skip_special_tokens": not has_special_token(tuple(params.stop), self._tokenizer),
            "logprobs": 0,
            "return_token_ids": True,
            "seed": params.seed if self._settings.generator.seed_requests else None,
        }
