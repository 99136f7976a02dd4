"""What an engine's two processes work per decoding step, with logprobs sent with each token and once per request.

    python benchmarks/logprob_traffic.py [--requests 512] [--tokens 128]

A tiny model with random weights, so that the work around it shows: CPU time of vLLM's core (with the model, on a CPU)
and of its front end, over the steps of `--requests` requests that run at once. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from random_model import model_config, write_checkpoint
from rich.console import Console
from rich.table import Table

from skyrl_train.inference.engine import Engine
from skyrl_train.inference.settings import EngineSettings
from skyrl_train.types import SamplingParams

PROMPT_TOKENS, ROUNDS = 16, 3
WAYS: dict[str, dict[str, object]] = {"with each token": {"scheduler_cls": None}, "once per request": {}}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(model: Path, kwargs: dict[str, object], num_requests: int, num_tokens: int) -> list[float]:
    """Milliseconds a step, median of the rounds after one of warm-up: of the clock, of the core, of the front end."""
    settings = EngineSettings(
        str(model),
        "tiny",
        "float32",
        PROMPT_TOKENS + num_tokens,
        kv_cache_memory_bytes=1 << 30,
        engine_init_kwargs=dict(kwargs),
    )
    before = set(psutil.Process().children(recursive=True))
    engine = Engine(settings)
    await engine.ready()
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
    Console().print(table)


if __name__ == "__main__":
    main()
