"""A real vLLM engine on the CPU whose weights change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.channels.channel import SendChannel
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from skyrl_train.weight_sync.send_report import SendReport
from skyrl_train.weight_sync.transport import Sender
from tests.support.sending import specs_of
from tests.support.settings import MIB, engine_settings
from tests.support.tiny import write_tiny_model

LOOP = asyncio.new_event_loop()
GREEDY = SamplingParams(max_generate_length=8, temperature=0.0)
PROMPTS = [[4 + (7 * n + k) % 50 for k in range(3 + n)] for n in range(4)]
TIMEOUT_S = 20.0
Named = list[tuple[str, torch.Tensor]]


def run(awaitable: Any) -> Any:
    return LOOP.run_until_complete(asyncio.wait_for(awaitable, timeout=120))


class Posted:
    """A call to the engine that runs in its loop, as a sender in another thread waits for it."""

    def __init__(self, call: Coroutine[Any, Any, None]) -> None:
        self._future = asyncio.run_coroutine_threadsafe(call, LOOP)

    def check(self) -> None:
        if self._future.done():
            self._future.result()

    def wait(self) -> None:
        self._future.result(timeout=60)


class World:
    """One engine, and two checkpoints that it may serve."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folders = [write_tiny_model(folder / str(seed), seed=seed) for seed in (1, 2)]
        for path in self.folders:
            add_sampling_defaults(path)
        self.models = [load_model(path) for path in self.folders]
        defaults: dict[str, Any] = {
            "model_path": str(self.folders[0]),
            "served_model_name": "tiny",
            "model_dtype": "float32",
            "max_model_len": 128,
            "kv_cache_memory_gb": 64 * MIB,
            "engine_init_kwargs": {"block_size": 32},
        }
        self.engine = VllmEngine(engine_settings(**(defaults | settings)))
        self.version = 0
        self.url: str | None = None

    def weights(self, which: int) -> Named:
        """As a trainer exports them: tied weights once."""
        return [(name, tensor) for name, tensor in self.models[which].state_dict().items() if name != "lm_head.weight"]

    async def generate(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Generation]:
        found: dict[int, Generation] = {}
        async for finished in self.engine.generate_batch([(n, prompt, params) for n, prompt in enumerate(prompts)]):
            found |= dict(finished)
        return [found[n] for n in range(len(prompts))]

    async def connect(
        self, channel: SendChannel, bucket_bytes: int, name: str = "trainer", named_tensors: Named = ()
    ) -> Sender:
        """Args: named_tensors: those of each update."""
        sender = Sender(
            channel, bucket_bytes, lambda message: Posted(self.engine.update_weights(message | {"sender": name}))
        )
        info = sender.init_info | {"sender": name, "weight_sync_timeout_s": TIMEOUT_S, "rank_offset": 1}
        info |= {"specs": [spec.to_message() for spec in specs_of(named_tensors)]}
        await asyncio.gather(asyncio.to_thread(sender.connect), self.engine.init_weight_sync(info))
        return sender

    async def send(self, named_tensors: Named, bucket_bytes: int, channel: SendChannel | None = None) -> SendReport:
        way = channel or ShmSendChannel(1, TIMEOUT_S)
        sender = await self.connect(way, bucket_bytes, named_tensors=named_tensors)
        await self.engine.begin_weight_update()
        try:
            return await asyncio.to_thread(sender.send, specs_of(named_tensors), named_tensors)
        finally:
            sender.close()

    async def sync(self, named_tensors: Named, bucket_bytes: int = 1 << 20) -> None:
        report = await self.send(named_tensors, bucket_bytes)
        self.version += 1
        await self.engine.finish_weight_update(self.version, report.digests)
        assert len(report.digests) == len(named_tensors)
        await self.engine.resume()

    @property
    def num_running(self) -> int:
        """Requests in flight."""
        return self.engine._core.llm.get_num_unfinished_requests()

    async def answers(self) -> list[list[int]]:
        return [generation.token_ids for generation in await self.generate(PROMPTS)]

    def expected(self, which: int) -> list[list[int]]:
        return [greedy(self.models[which], prompt)[0] for prompt in PROMPTS]


def add_sampling_defaults(folder: Path) -> None:
    """Sampling defaults like those that publishers ship, with which every token is the likeliest; none may be taken."""
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {"do_sample": True, "top_k": 1, "repetition_penalty": 1.5, "temperature": 0.1}))


def load_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], length: int = 8) -> tuple[list[int], list[float]]:
    """Hugging Face's own answer: tokens and their logprobs."""
    tokens, logprobs = list(prompt), []
    for _ in range(length):
        row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        if tokens[-1] == 1:
            break
    return tokens[len(prompt) :], logprobs


def live_world(folder: Path, **settings: Any) -> Iterator[World]:
    others = psutil.Process().children(recursive=True)  # such as the server of jobs
    world = World(folder, **settings)
    world.url = run(world.engine.start(waits_for_weights=False)).url
    children = [process for process in psutil.Process().children(recursive=True) if process not in others]
    shared = {area.path for child in children for area in mapped(child) if area.path.startswith("/dev/shm/")}
    llm = weakref.ref(world.engine._core.llm)
    yield world
    with slow_threads():
        run(world.engine.shutdown())
        gc.collect()  # the tracebacks of requests that failed hold one another
        assert llm() is None, "somebody still holds vLLM after the engine was shut down"
    _, alive = psutil.wait_procs([p for p in children if "resource_tracker" not in " ".join(cmdline(p))], timeout=10)
    assert not alive, "the engine left processes behind"
    assert not [path for path in shared if Path(path).exists() and not Path(path).name.startswith("sem.")]


@contextlib.contextmanager
def slow_threads() -> Iterator[None]:
    """A thread whose result has come keeps running for a while, as on busy cores."""
    ended, set_result = threading.Event(), Future.set_result

    def set_and_wait(future: Future[Any], result: Any) -> None:
        set_result(future, result)
        ended.wait(timeout=30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Future, "set_result", set_and_wait)
        try:
            yield
        finally:
            ended.set()


def mapped(process: psutil.Process) -> list[Any]:
    try:
        return process.memory_maps()
    except psutil.Error:
        return []


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
