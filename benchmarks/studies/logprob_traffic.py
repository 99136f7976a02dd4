"""What an engine's two processes work per decoding step, with logprobs sent with each token and once per request; and
what the front end works for logprobs where all requests end in the same step.

    python -m benchmarks.studies.logprob_traffic [--requests 512] [--tokens 128]

A tiny model with random weights, so that the work around it shows: CPU time of vLLM's core (with the model, on a CPU)
and of its front end, over the steps of `--requests` requests that run at once and end together; then the time in which
the front end takes the logprobs of all of them out of their arrays, as vLLM does and at once. Run on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from benchmarks.lib.random_model import model_config, write_checkpoint
from rich.console import Console
from rich.table import Table

from skyrl_train.config import load_config
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.types import SamplingParams

PROMPT_TOKENS, ROUNDS = 16, 3
WAYS: dict[str, dict[str, object]] = {"with each token": {"scheduler_cls": None}, "once per request": {}}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(model: Path, kwargs: dict[str, object], num_requests: int, num_tokens: int) -> list[float]:
    """Milliseconds a step, median of the rounds after one of warm-up: of the clock, of the core, of the front end."""
    generator = replace(load_config([]).generator, model_dtype="float32", kv_cache_memory_gb=1)
    settings = EngineSettings(
        generator=replace(generator, engine_init_kwargs=dict(kwargs)),
        index=0,
        model_path=str(model),
        served_model_name="tiny",
        max_model_len=PROMPT_TOKENS + num_tokens,
        seed=0,
        rpc_timeout_s=600,
    )
    before = set(psutil.Process().children(recursive=True))
    engine = VllmEngine(settings)
    await engine.start(waits_for_weights=False)
    started = set(psutil.Process().children(recursive=True)) - before
    (core,) = (process for process in started if "EngineCore" in " ".join([process.name(), *process.cmdline()]))
    draw, params = random.Random(0), SamplingParams(max_generate_length=num_tokens)
    vocabulary = model_config("tiny").vocab_size
    rounds = []
    for _ in range(1 + ROUNDS):
        prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
        at = (time.perf_counter(), cpu_s(core), cpu_s(psutil.Process()))
        async for _ in engine.generate_batch([(index, ids, params) for index, ids in enumerate(prompts)]):
            pass
        then = (time.perf_counter(), cpu_s(core), cpu_s(psutil.Process()))
        rounds.append([1e3 * (b - a) / num_tokens for a, b in zip(at, then, strict=True)])
    await engine.shutdown()
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def unpacking_ms(num_requests: int, num_tokens: int) -> dict[str, float]:
    """Of all requests' logprobs, medians of the rounds. To be called when an engine has been built."""
    import numpy as np
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    ours: Any = LogprobsProcessor._update_sample_logprobs
    draw = np.random.default_rng(0)
    shape = num_tokens, 1
    lists = LogprobsLists(
        draw.integers(0, 1000, shape).astype(np.int32), -draw.random(shape, np.float32), np.ones(num_tokens, np.int32)
    )
    found = {}
    for name, update in {"token by token": ours.__wrapped__, "at once": ours}.items():
        rounds = []
        for _ in range(ROUNDS):
            processors = [
                LogprobsProcessor(None, create_sample_logprobs(True), None, 0.0, 0, None) for _ in range(num_requests)
            ]
            started = time.perf_counter()
            for processor in processors:
                update(processor, lists)
            rounds.append(1e3 * (time.perf_counter() - started))
        found[name] = statistics.median(rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    table = Table("logprobs travel", "step ms", "core CPU ms", "front end CPU ms")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "tiny")
        for name, kwargs in WAYS.items():
            found = asyncio.run(measure(Path(folder), kwargs, args.requests, args.tokens))
            table.add_row(name, *(f"{value:.1f}" for value in found))
    console = Console()
    console.print(table)
    took = ", ".join(f"{name} {ms:.1f} ms" for name, ms in unpacking_ms(args.requests, args.tokens).items())
    console.print(f"{args.requests} requests of {args.tokens} tokens that end together, in the front end: {took}")


if __name__ == "__main__":
    main()
