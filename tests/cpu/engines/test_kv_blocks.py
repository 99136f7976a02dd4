"""A scheduler that skips needless allocations of blocks makes the schedules that vLLM's makes, and responses that keep
their KV cache at a weight sync are those of a model with keys and values of two versions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.types import Generation, SamplingParams
from tests.support.live_engine import World, greedy, live_world, run
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
        max_num_batched_tokens=40,  # prompts are split
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


def add_requests(scheduler: Any, number: int, rng: np.random.Generator) -> None:
    """Of random lengths, some with a prefix of others."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, sha256)
    for index in range(number):
        prompt = [index % 3] * int(rng.integers(1, 40))
        params = SamplingParams(max_tokens=int(rng.integers(1, 50)), ignore_eos=True)
        scheduler.add_request(Request(str(index), prompt, params, None, block_hasher=hasher, arrival_time=index))


def hashes(scheduler: Any) -> list[str]:
    """Of each block: what the prefix cache knows it by."""
    return [str(block.block_hash) for block in scheduler.kv_cache_manager.block_pool.blocks]


def sampled(scheduler: Any, step: Any, rng: np.random.Generator) -> Any:
    """Output of a step that was just scheduled."""
    is_last = [(each, not scheduler.requests[each].is_prefill_chunk) for each in step.num_scheduled_tokens]
    return output([(each, [int(rng.integers(9))] * last) for each, last in is_last])


def schedules(scheduler: Any, is_async: bool) -> list[Any]:
    """What is scheduled for many requests, some of which are aborted."""
    from vllm.v1.request import RequestStatus

    rng = np.random.default_rng(0)
    add_requests(scheduler, NUM_REQUESTS, rng)
    steps, in_flight = list[Any](), deque[Any]()
    while scheduler.has_unfinished_requests():
        cached = hashes(scheduler)
        step = scheduler.schedule()
        steps.append(
            (
                dict(step.num_scheduled_tokens),
                [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs],
                list(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.new_block_ids, strict=True)),
                step.preempted_req_ids,
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                cached,
            )
        )
        in_flight.append((step, sampled(scheduler, step, rng)))
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


@pytest.mark.parametrize("forgets_at", [0, 1, 8])
def test_running_requests_keep_their_blocks_and_add_none_to_an_emptied_prefix_cache(model: Path, forgets_at: int):
    """Also those that have read a part of their prompt, or less than a block."""
    from skyrl_train.engines.vllm.kv_blocks import forget_prefixes

    kept, rng = scheduler(model, num_blocks=400, caching=True, is_async=False), np.random.default_rng(0)
    manager = kept.kv_cache_manager
    blocks_of = manager.coordinator.single_type_managers[0].req_to_blocks
    add_requests(kept, 6, rng)
    old = list[str]()
    for number in range(60):
        step = kept.schedule()
        assert not step.preempted_req_ids
        kept.update_from_output(step, sampled(kept, step, rng))
        if number == forgets_at:
            old = [each for each, blocks in blocks_of.items() if blocks]
            assert forget_prefixes(manager) and set(hashes(kept)) == {"None"}
        assert all(block.block_hash is None for each in old for block in blocks_of.get(each, ()))
    assert len(old) > 1 and not kept.has_unfinished_requests()
    assert manager.block_pool.get_num_free_blocks() == 399
    add_requests(kept, 1, rng)
    step = kept.schedule()
    kept.update_from_output(step, sampled(kept, step, rng))
    assert len(set(hashes(kept))) > 1, "later requests fill it again"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An engine with two full blocks of each prompt in its prefix cache."""
    yield from live_world(tmp_path_factory.mktemp("keeps"), recompute_kv_cache=False)


PROMPTS = [[4 + (7 * n + k) % 50 for k in range(70 + n)] for n in range(4)]


@pytest.mark.slow
def test_running_responses_keep_their_kv_cache_and_later_ones_find_none_of_it(world: World):
    async def main() -> tuple[list[Generation], list[Generation]]:
        params = SamplingParams(max_generate_length=50, temperature=1.0)
        running = asyncio.create_task(world.generate(PROMPTS * 4, params))
        states: Any = world.engine._core.llm.output_processor.request_states
        while not any(state.detokenizer.num_output_tokens() > 2 for state in states.values()):
            await asyncio.sleep(0.002)
        await world.sync(world.weights(1))
        return await world.generate(PROMPTS), await running

    later, running = run(main())
    assert [one.token_ids for one in later] == [greedy(world.models[1], prompt)[0] for prompt in PROMPTS]
    interrupted = [(n, one) for n, one in enumerate(running) if len(one.version_spans) == 2]
    assert interrupted
    for n, one in interrupted:
        prompt, count = PROMPTS[n % 4], one.version_spans[0][1]
        # The last token before the sync was sampled, but not read yet.
        with torch.no_grad():
            old = world.models[0](torch.tensor([prompt + one.token_ids[: count - 1]]), use_cache=True)
            read = torch.tensor([one.token_ids[count - 1 : -1]])
            mixed = world.models[1](read, past_key_values=old.past_key_values).logits[0].log_softmax(-1)
            new = world.models[1](torch.tensor([prompt + one.token_ids])).logits[0].log_softmax(-1)
        after = torch.tensor(one.token_ids[count:])
        expected = mixed.gather(-1, after[:, None]).flatten()
        assert one.logprobs[count:] == pytest.approx(expected.tolist(), abs=2e-5)
        recomputed = new[len(prompt) + count - 1 : -1].gather(-1, after[:, None]).flatten()
        assert one.logprobs[count:] != pytest.approx(recomputed.tolist(), abs=1e-3)
    run(world.sync(world.weights(0)))
    assert [one.token_ids for one in run(world.generate(PROMPTS))] == [greedy(world.models[0], p)[0] for p in PROMPTS]
