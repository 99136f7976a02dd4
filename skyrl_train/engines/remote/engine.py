"""A running vLLM server as an `Engine`.

The server's weights are unknown when a run connects (those of an earlier run, half an update), so the run sends a
complete update before the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyrl_train.engines.protocol import EngineDeadError, EngineFacts
from skyrl_train.engines.remote.client import ServerClient, ServerError, ServerUnreachableError
from skyrl_train.engines.remote.facts import ServerUnsuitableError, check_server, probe
from skyrl_train.engines.remote.lifecycle import HttpLifecycle
from skyrl_train.engines.settings import EngineSettings, PauseMode, room_to_answer, still_running
from skyrl_train.engines.sync_report import check_reports
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

MAX_CONNECTIONS = 512
"""Concurrent requests to the server; others wait here. Each is an open socket, of which a process may have 1024."""
PROBE_S = 30.0
PROBE_TEXT = "The answer to 12 + 34 is 46; naïve café, 北京.\n\tx = [1, 2]\n"


class RemoteEngine:
    """Contacts the server in `start` first. The server's device is not shared, so it never sleeps."""

    _lifecycle: HttpLifecycle
    """Set by `start`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        # Two pools: control calls must not wait behind requests.
        self._control = ServerClient(settings.url, settings.api_key, max_connections=32)
        self._generation = ServerClient(settings.url, settings.api_key, MAX_CONNECTIONS)
        self._policy_version = 0
        self._needs_weights = True
        self._running = asyncio.Event()
        self._running.set()
        self._update_lock = asyncio.Lock()

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """Check that the server suits this run; what it answers before the first weight sync is not controlled.

        Raises: ServerUnreachableError; ServerUnsuitableError naming the difference and what to do about it.
        """
        facts = await probe(self._control, min(PROBE_S, self._settings.rpc_timeout_s))
        check_server(facts, self._settings)
        await self._check_tokenizer()
        self._lifecycle = HttpLifecycle(self._control, facts, self._settings.rpc_timeout_s)
        return EngineFacts(facts.num_workers)

    async def ping(self, timeout_s: float) -> None:
        """A stock server is asked for its /health only."""
        stock = self._lifecycle.is_stock
        answer = self._control.get("/health", timeout_s) if stock else self._lifecycle.rpc("skyrl_ping")
        await asyncio.wait_for(self._call(answer), timeout_s)

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
        async def score(token_ids: list[int]) -> list[float]:
            body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            call = self._generation.post("/v1/completions", body, self._settings.rpc_timeout_s)
            rows = (await self._call(call))["choices"][0]["prompt_logprobs"]
            pairs = zip(rows[1:], token_ids[1:], strict=True)
            return [0.0] + [row[str(token_id)]["logprob"] for row, token_id in pairs]

        return list(await asyncio.gather(*(score(token_ids) for token_ids in prompts)))

    async def sleep(self, *, keep_weights: bool = False) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_kv_cache(self) -> None: ...

    async def memory(self) -> list[dict[str, float]]:
        return []

    async def pause(self, mode: PauseMode | None = None) -> None:
        self._running.clear()
        chosen: str = self._settings.generator.pause_mode if mode is None else mode
        try:
            await self._call(self._lifecycle.pause(chosen))
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
        await self._call(self._lifecycle.resume())
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        await self._call(self._lifecycle.init(info))

    async def begin_weight_update(self) -> None:
        """Pause and expect weights; an update that failed before, also another client's, is closed."""
        await self.pause()
        if self._needs_weights:
            await self._call(self._lifecycle.close_failed_update())
        self._needs_weights = True
        await self._call(self._lifecycle.start())

    async def update_weights(self, message: ControlMessage) -> None:
        """Raises: WeightSyncError with the server's error."""
        async with self._update_lock:  # two calls at once could arrive in any order
            try:
                await self._call(self._lifecycle.update(message))
            except ServerError as error:
                raise WeightSyncError(
                    f"the server {self._settings.url}, which serves {self._lifecycle.facts.model}, could not load the "
                    f"weights of {self._settings.model_path}: {error}"
                ) from error

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """A stock server reports no digests: only the comparison of logprobs can verify its weights."""
        if not self._lifecycle.is_stock:
            check_reports(await self._call(self._lifecycle.rpc("skyrl_sync_report")), sent_digests, "server")
        await self._call(self._lifecycle.finish())
        if not await self._call(self._lifecycle.reset_prefix_cache()):
            raise WeightSyncError("the server did not reset its prefix cache: a running request holds parts of it")
        await self._call(self._lifecycle.set_version(policy_version))
        self._policy_version = policy_version
        self._needs_weights = False

    async def shutdown(self) -> None:
        """Close the connections; the server keeps running, and stays paused if its weights are incomplete."""
        self._running.clear()
        await self._control.close()
        await self._generation.close()

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
        generation = Generation(
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            text=choice["text"],
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
            "skip_special_tokens": True,
            "logprobs": 0,
            "return_token_ids": True,
            "seed": params.seed if self._settings.generator.seed_requests else None,
        }

    async def _check_tokenizer(self) -> None:
        """Raises: ServerUnsuitableError if the server's vocabulary is not the policy's."""
        from transformers import AutoTokenizer

        expected = AutoTokenizer.from_pretrained(self._settings.model_path, trust_remote_code=False).encode(
            PROBE_TEXT, add_special_tokens=False
        )
        body = {"prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            found = (await self._control.post("/tokenize", body, PROBE_S))["tokens"]
        except ServerError as error:
            raise ServerUnsuitableError(f"the server {self._settings.url} cannot tokenize: {error}") from error
        if found != expected:
            raise ServerUnsuitableError(
                f"the server {self._settings.url} has another vocabulary than {self._settings.model_path}: its tokens "
                f"of a probe text are {found[:8]}..., the policy's are {expected[:8]}.... Serve the policy's model"
            )
