"""A vLLM server that runs already, with the methods of `Engine`.

What the server holds when a run connects is not known (the weights of an earlier run, half an update), so whoever
connects sends a whole update before the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from skyrl_train.engines.protocol import EngineDeadError, EngineFacts
from skyrl_train.engines.remote.client import ServerClient, ServerError, ServerUnreachableError
from skyrl_train.engines.remote.facts import ServerFacts, ServerUnsuitableError, check_server, probe
from skyrl_train.engines.remote.lifecycle import HttpLifecycle
from skyrl_train.engines.settings import EngineSettings, PauseMode, still_running
from skyrl_train.engines.sync_report import SyncReport, checked_report
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError

MAX_CONNECTIONS = 512
"""Requests in flight at the server; more wait here. Each is an open socket, of which a process may have 1024."""
PROBE_S = 30.0
PROBE_TEXT = "The answer to 12 + 34 is 46; naïve café, 北京.\n\tx = [1, 2]\n"


class RemoteEngine:
    """Nothing is asked of the server before `ready`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        # Two pools: control calls must not wait behind requests.
        self._control = ServerClient(settings.url, settings.api_key, max_connections=32)
        self._generation = ServerClient(settings.url, settings.api_key, MAX_CONNECTIONS)
        self._connected: tuple[HttpLifecycle, ServerFacts] | None = None
        self._policy_version = 0
        self._paused = False
        self._needs_weights = True
        self._tensors_received = 0
        self._in_flight = 0
        self._tokens_generated = 0
        self._running = asyncio.Event()
        self._running.set()
        self._update_lock = asyncio.Lock()

    async def ready(self) -> dict[str, Any]:
        """Look whether the server suits this run.

        Returns: what the caller needs to connect the weight sync.
        Raises: ServerUnreachableError; ServerUnsuitableError naming the difference and the cure.
        """
        if self._connected is None:
            facts = await probe(self._control, min(PROBE_S, self._settings.rpc_timeout_s))
            check_server(facts, self._settings)
            await self._check_tokenizer()
            self._connected = HttpLifecycle(self._control, facts, self._settings.rpc_timeout_s), facts
        else:
            await self._call(self._control.get("/health", PROBE_S))
        return {"num_workers": self._facts.num_workers, "policy_version": self._policy_version}

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """As `Engine.start`; what the server answers before the first weight sync is its own matter."""
        return EngineFacts((await self.ready())["num_workers"])

    async def ping(self, timeout_s: float) -> None:
        """As `Engine.ping`; of a stock server only that it answers is asked."""
        stock = self._connected is None or self._lifecycle.is_stock
        answer = self._control.get("/health", timeout_s) if stock else self._lifecycle.rpc("skyrl_ping")
        await asyncio.wait_for(self._call(answer), timeout_s)

    async def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """As `Engine.generate_batch`; leaving the iterator closes the connections, which aborts the requests."""
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
        """As `Engine.prompt_logprobs`."""

        async def one(token_ids: list[int]) -> list[float]:
            body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            call = self._generation.post("/v1/completions", body, self._settings.rpc_timeout_s)
            rows = (await self._call(call))["choices"][0]["prompt_logprobs"]
            pairs = zip(rows[1:], token_ids[1:], strict=True)
            return [0.0] + [row[str(token_id)]["logprob"] for row, token_id in pairs]

        return list(await asyncio.gather(*(one(token_ids) for token_ids in prompts)))

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """The server's device is nobody else's."""

    async def wake_weights(self) -> None:
        """They are there."""

    async def wake_kv_cache(self) -> None:
        """It is there."""

    async def memory(self) -> list[dict[str, float]]:
        """A server does not tell."""
        return []

    async def pause(self, mode: PauseMode | None = None) -> None:
        """As `Engine.pause`."""
        self._running.clear()
        self._paused = True
        chosen: str = self._settings.generator.pause_mode if mode is None else mode
        try:
            await self._call(self._lifecycle.pause(chosen))
        except TimeoutError as error:
            if chosen != "wait":
                raise
            raise still_running(self._settings.rpc_timeout_s) from error

    async def resume(self) -> None:
        """Raises: WeightSyncError while the weights are not whole."""
        if self._needs_weights:
            raise WeightSyncError(
                f"no whole weight update of {self._settings.url} since the run connected or since one broke off: the "
                "server stays paused until one has gone through"
            )
        await self._call(self._lifecycle.resume())
        self._paused = False
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        """As `Engine.init_weight_sync`."""
        await self._call(self._lifecycle.init(info))

    async def begin_weight_update(self) -> None:
        """`pause` and `start_weight_update` in one call."""
        await self.pause()
        await self.start_weight_update()

    async def start_weight_update(self) -> None:
        """An update that broke off before is given up, whoever began it.

        Raises: WeightSyncError unless paused.
        """
        if not self._paused:
            raise WeightSyncError("pause the engine before a weight update: one step on half-loaded weights kills it")
        if self._needs_weights:
            await self._call(self._lifecycle.close_broken_update())
        self._needs_weights = True
        self._tensors_received = 0
        await self._call(self._lifecycle.start())

    async def update_weights(self, message: ControlMessage) -> None:
        """As `Engine.update_weights`. Raises: WeightSyncError with what the server said."""
        async with self._update_lock:  # of two calls on their way at once, either may come first
            try:
                await self._call(self._lifecycle.update(message))
            except ServerError as error:
                raise WeightSyncError(
                    f"the server {self._settings.url}, which serves {self._facts.model}, could not take in the weights "
                    f"of {self._settings.model_path}: {error}"
                ) from error
            self._tensors_received += len(message.get("names", ()))

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> SyncReport:
        """As `Engine.finish_weight_update`. A stock server has no digests: that all of it arrived is then known only by
        the names that it was told, and that it computes with them by comparing logprobs."""
        report = SyncReport(policy_version, self._tensors_received, num_parameters=0, digests={})
        if not self._lifecycle.is_stock:
            workers = await self._call(self._lifecycle.rpc("skyrl_sync_report"))
            report = checked_report(policy_version, workers, sent_digests, "server")
        await self._call(self._lifecycle.finish())
        if not await self._call(self._lifecycle.reset_prefix_cache()):
            raise WeightSyncError("the server did not reset its prefix cache: a running request holds parts of it")
        await self._call(self._lifecycle.set_version(policy_version))
        self._policy_version = policy_version
        self._needs_weights = False
        return report

    async def stats(self) -> dict[str, float]:
        """As `Engine.stats`."""
        return {
            "policy_version": self._policy_version,
            "paused": float(self._paused),
            "needs_weights": float(self._needs_weights),
            "requests_running": self._in_flight,
            "tokens_generated": self._tokens_generated,
        }

    async def shutdown(self) -> None:
        """Lets go of the server, which goes on running: with whole weights it serves, with half ones it is paused."""
        self._running.clear()
        await self._control.close()
        await self._generation.close()

    @property
    def _lifecycle(self) -> HttpLifecycle:
        assert self._connected is not None, "call ready first"
        return self._connected[0]

    @property
    def _facts(self) -> ServerFacts:
        assert self._connected is not None, "call ready first"
        return self._connected[1]

    async def _call(self, awaitable: Any) -> Any:
        try:
            return await awaitable
        except ServerUnreachableError as error:
            raise EngineDeadError(str(error)) from error

    async def _generate(self, index: int, body: dict[str, Any]) -> tuple[int, Generation]:
        began_with = self._policy_version  # what an update lets run on may end with another
        self._in_flight += 1
        try:
            answer = await self._call(self._generation.post("/v1/completions", body, None))
        finally:
            self._in_flight -= 1
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise RuntimeError(f"{self._settings.url} ended a request with {choice['finish_reason']!r}")
        self._tokens_generated += len(choice["token_ids"])
        generation = Generation(
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            text=choice["text"],
            stop_reason=choice["finish_reason"],
            policy_version=began_with,
        )
        return index, generation

    def _body(self, token_ids: list[int], params: SamplingParams) -> dict[str, Any]:
        """Every parameter is written out: what is not comes from the model's generation_config.json.

        Raises: ValueError for a prompt that leaves no room for a token.
        """
        room = self._settings.max_model_len - len(token_ids)
        if room < 1 or not token_ids:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens does not fit an engine of {self._settings.max_model_len} tokens; "
                "lower generator.max_input_length or trainer.max_prompt_length"
            )
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
                f"the server {self._settings.url} has another vocabulary than {self._settings.model_path}: it reads a "
                f"probe text as {found[:8]}..., the policy's tokenizer as {expected[:8]}...; serve the policy's model"
            )
