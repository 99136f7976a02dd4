"""Generation with logprobs sent with each token, as vLLM does, and once per request, in turns on one engine.

    python -m benchmarks.studies.logprob_traffic [--shape qwen3-0.6b] [--requests 512] [--tokens 512] [--rounds 5]

Random weights; all requests run at once, have a prompt of 128 tokens and end together. Prints for both the time of the
clock, the time from the first answer to the last, and the CPU time of the process that owns the requests: medians of
the rounds after one of warm-up.
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
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

from benchmarks.lib.random_model import SHAPES, model_config, write_checkpoint
from rich.console import Console
from rich.table import Table

from skyrl_train.config import load_config
from skyrl_train.device import device_type
from skyrl_train.engines import settings as engine_settings
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.types import SamplingParams

PROMPT_TOKENS = 128
FLAG = "SKYRL_LOGPROBS_WITH_EACH_TOKEN"
"""Environment variable: a file that exists while logprobs are to be sent with each token."""
ARMS = ("with each token", "once per request")


def scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """The engine's scheduler, which keeps no logprobs while the file FLAG exists."""
    from skyrl_train.engines.vllm.scheduling import scheduler as schedulers

    built: Any = schedulers.scheduler(vllm_config, **arguments)
    kind, flag = type(built), Path(os.environ[FLAG])

    class Switched(kind):  # type: ignore[misc, valid-type]
        sends_each = False

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            self.sends_each = flag.exists()
            return super().update_from_output(*args, **kwargs)

        def _may_wait(self, request_id: str) -> bool:
            return not self.sends_each and super()._may_wait(request_id)

    built.__class__ = Switched
    return built


async def measure(args: argparse.Namespace, model: Path, flag: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds of the clock, from the first answer to the last, and of this process's CPU, for each round of both arms."""
    generator = load_config([]).generator
    sizes: dict[str, Any] = {"kv_cache_memory_gb": 1.0} if device_type() == "cpu" else {"gpu_memory_utilization": 0.8}
    settings = engine_settings.EngineSettings(
        generator=replace(generator, model_dtype="bfloat16", max_num_seqs=args.requests, **sizes),
        index=0,
        model_path=str(model),
        served_model_name="policy",
        max_model_len=PROMPT_TOKENS + args.tokens,
        seed=0,
        rpc_timeout_s=600,
    )
    engine = VllmEngine(settings)
    await engine.start(waits_for_weights=False)
    rng, params = random.Random(0), SamplingParams(max_generate_length=args.tokens)
    vocabulary = model_config(args.shape).vocab_size
    found: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in ARMS}
    for number in range(1 + args.rounds):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            flag.touch() if arm == ARMS[0] else flag.unlink(missing_ok=True)
            prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(args.requests)]
            started, cpu, answers = time.perf_counter(), time.process_time(), list[float]()
            async for _ in engine.generate_batch([(index, ids, params) for index, ids in enumerate(prompts)]):
                answers.append(time.perf_counter())
            found[arm].append((answers[-1] - started, answers[-1] - answers[0], time.process_time() - cpu))
    await engine.shutdown()
    return {arm: rounds[1:] for arm, rounds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine_settings.SCHEDULER = "benchmarks.studies.logprob_traffic.scheduler"
    table = Table("logprobs travel", "generation s", "least", "first to last answer s", "front end CPU s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FLAG] = str(Path(folder, "each"))
        write_checkpoint(Path(folder, "model"), args.shape)
        for arm, rounds in asyncio.run(measure(args, Path(folder, "model"), Path(folder, "each"))).items():
            medians = [f"{statistics.median(values):.2f}" for values in zip(*rounds, strict=True)]
            table.add_row(arm, medians[0], f"{min(rounds)[0]:.2f}", *medians[1:])
    Console().print(table)


if __name__ == "__main__":
    main()
