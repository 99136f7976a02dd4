"""Time of vLLM's scheduler for each request and step, and of the engines' (engines/vllm/scheduling/plain_steps.py).

    python -m benchmarks.studies.scheduler_time [--requests 512] [--steps 400] [--turnover]

No model runs: the scheduler of an engine is called as its core calls it, with outputs of one token for each request.
Prompts of 128 tokens, eight requests with each, which decode in all steps; with --turnover the requests of one prompt
end in each step, and those of another arrive. Prints microseconds of `schedule` and `update_from_output` per request and
step, the share of steps in which requests join, and the mean number of requests of a step.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from benchmarks.lib.random_model import model_config
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobsAsync

BLOCK, NUM_BLOCKS, PROMPT_TOKENS, SAMPLES, WARM_UP = 16, 40_000, 128, 8, 30


def scheduler(kind: Any, folder: str, requests: int, steps: int, *, turnover: bool) -> Any:
    longest = PROMPT_TOKENS + steps + 2
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * PROMPT_TOKENS,  # no prompt is split
        max_model_len=longest,
        block_size=BLOCK,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    init_none_hash(sha256)
    made = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )
    for number in range(requests):
        add_request(made, number, WARM_UP + number // SAMPLES if turnover else steps + 1)
    return made


def add_request(made: Any, number: int, tokens: int) -> None:
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = [3 * (number // SAMPLES) + k for k in range(PROMPT_TOKENS)]
    made.add_request(Request(str(number), prompt, params, None, block_hasher=hasher, arrival_time=float(number)))


def output(made: Any, step: Any) -> ModelRunnerOutput:
    """One token for each request of a step that was just scheduled, if its prompt is complete."""
    ids = list(step.num_scheduled_tokens)
    count = len(ids)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[7] * (not made.requests[request_id].is_prefill_chunk) for request_id in ids],
        logprobs=LogprobsLists(
            np.zeros((count, 1), np.int32), np.zeros((count, 1), np.float32), np.zeros(count, np.int32)
        ),
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def measured(made: Any, requests: int, steps: int) -> tuple[float, float, float, float]:
    """Microseconds of `schedule` and of `update_from_output` for each request and step after the warm-up, the share of
    steps in which requests join, and the requests of a step. A request that ends is replaced.
    """
    schedule_s = update_s = 0.0
    num_requests, num_joining, added, in_flight = 0, 0, requests, deque[Any]()
    gc.collect()
    gc.freeze()
    for number in range(steps):
        before = time.perf_counter()
        step = made.schedule()
        scheduled = time.perf_counter()
        in_flight.append((step, output(made, step)))
        if number == 0:
            continue
        done, tokens = in_flight.popleft()
        begun = time.perf_counter()
        by_client = made.update_from_output(done, tokens)
        if number >= WARM_UP:
            update_s += time.perf_counter() - begun
            schedule_s += scheduled - before
            num_requests += len(done.num_scheduled_tokens)
            num_joining += bool(step.scheduled_new_reqs)
        ended = [each for some in by_client.values() for each in some.outputs if each.finish_reason is not None]
        for _ in ended:
            add_request(made, added, requests // SAMPLES)
            added += 1
    counted = steps - WARM_UP
    times = 1e6 * schedule_s / num_requests, 1e6 * update_s / num_requests
    return *times, num_joining / counted, num_requests / counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turnover", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = model_config("qwen3-0.6b")
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(Path(folder))
        for kind in (AsyncScheduler, KeepsLogprobsAsync):
            made = scheduler(kind, folder, args.requests, args.steps, turnover=args.turnover)
            schedule, update, joining, running = measured(made, args.requests, args.steps)
            print(
                f"{kind.__name__:18} schedule {schedule:.2f}  update_from_output {update:.2f}  both "
                f"{schedule + update:.2f} us; requests join in {joining:.0%} of the steps, of {running:.1f} requests"
            )


if __name__ == "__main__":
    main()
