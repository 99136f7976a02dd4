"""A scheduler that skips needless allocations of blocks makes the schedules that vLLM's makes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import write_tiny_model

BLOCK, NUM_REQUESTS, MAX_LEN = 8, 24, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LEN)


def scheduler(model: Path, *, num_blocks: int, caching: bool, is_async: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from skyrl_train.engines.vllm.whole_logprobs import KeepsLogprobs, KeepsLogprobsAsync

    config = EngineArgs(
        model=str(model),
        max_num_seqs=12,
        max_num_batched_tokens=40,  # prompts come in pieces
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        enable_prefix_caching=caching,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    kind = KeepsLogprobsAsync if is_async else KeepsLogprobs
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def schedules(scheduler: Any, is_async: bool) -> list[Any]:
    """What is scheduled for requests of random lengths, some with a prefix of others, some aborted."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    rng, hasher = np.random.default_rng(0), get_request_block_hasher(BLOCK, sha256)
    for number in range(NUM_REQUESTS):
        prompt = [number % 3] * int(rng.integers(1, 40))
        params = SamplingParams(max_tokens=int(rng.integers(1, 50)), ignore_eos=True)
        scheduler.add_request(Request(str(number), prompt, params, None, block_hasher=hasher, arrival_time=number))
    steps, in_flight = list[Any](), deque[Any]()
    while scheduler.has_unfinished_requests():
        pool = scheduler.kv_cache_manager.block_pool
        cached = [str(block.block_hash) for block in pool.blocks]
        step = scheduler.schedule()
        steps.append(
            (
                dict(step.num_scheduled_tokens),
                [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs],
                list(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.new_block_ids, strict=True)),
                step.preempted_req_ids,
                pool.get_num_free_blocks(),
                cached,
            )
        )
        sampled = [(each, not scheduler.requests[each].is_prefill_chunk) for each in step.num_scheduled_tokens]
        in_flight.append((step, output([(each, [int(rng.integers(9))] * is_last) for each, is_last in sampled])))
        if len(in_flight) > is_async:
            scheduler.update_from_output(*in_flight.popleft())
        if len(steps) % 20 == 0 and scheduler.running:
            scheduler.finish_requests(scheduler.running[-1].request_id, RequestStatus.FINISHED_ABORTED)
        assert len(steps) < 2000
    return steps


def output(tokens: list[tuple[str, list[int]]]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=[request_id for request_id, _ in tokens],
        req_id_to_index={request_id: index for index, (request_id, _) in enumerate(tokens)},
        sampled_token_ids=[each for _, each in tokens],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("num_blocks", [40, 400], ids=["preemption", "room"])
def test_schedules_are_those_of_vllm(
    model: Path, num_blocks: int, caching: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch
):
    from skyrl_train.engines.vllm import whole_logprobs

    ours = scheduler(model, num_blocks=num_blocks, caching=caching, is_async=is_async)
    assert ours.kv_cache_manager.allocate_slots.__name__ == "allocate_if_needed"
    monkeypatch.setattr(whole_logprobs, "skip_needless_allocations", lambda manager: None)
    theirs = scheduler(model, num_blocks=num_blocks, caching=caching, is_async=is_async)
    found, expected = schedules(ours, is_async), schedules(theirs, is_async)
    assert found == expected
    assert any(step[3] for step in expected) == (num_blocks == 40), "some requests are preempted"
