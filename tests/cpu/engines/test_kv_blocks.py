"""Responses that keep their KV cache at a weight sync are those of a model with keys and values of two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.types import Generation, SamplingParams
from tests.support.live_engine import World, greedy, live_world, run
from tests.support.scheduling import MAX_LEN, add_requests, hashes, sampled, scheduler
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LEN)


@pytest.mark.parametrize("forgets_at", [0, 1, 8])
def test_running_requests_keep_their_blocks_and_add_none_to_an_emptied_prefix_cache(model: Path, forgets_at: int):
    """Also those that have read a part of their prompt, or less than a block."""
    from skyrl_train.engines.vllm.scheduling.kv_blocks import forget_prefixes
    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobs

    kept, rng = scheduler(model, KeepsLogprobs, num_blocks=400, caching=True), np.random.default_rng(0)
    manager = kept.kv_cache_manager
    blocks_of = manager.coordinator.single_type_managers[0].req_to_blocks
    add_requests(kept, range(6), rng)
    old = list[str]()
    for number in range(95):
        step = kept.schedule()
        assert not step.preempted_req_ids
        kept.update_from_output(step, sampled(kept, step, rng))
        if number == forgets_at:
            old = [each for each, blocks in blocks_of.items() if blocks]
            assert forget_prefixes(manager) and set(hashes(kept)) == {"None"}
        assert all(block.block_hash is None for each in old for block in blocks_of.get(each, ()))
    assert len(old) > 1 and not kept.has_unfinished_requests()
    assert manager.block_pool.get_num_free_blocks() == 399
    add_requests(kept, range(1), rng)
    step = kept.schedule()
    kept.update_from_output(step, sampled(kept, step, rng))
    assert len(set(hashes(kept))) > 1, "later requests fill it again"


def test_an_empty_prefix_cache_is_not_emptied_again_unless_a_request_holds_a_block(model: Path):
    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobs

    kept, rng = scheduler(model, KeepsLogprobs, num_blocks=400, caching=True), np.random.default_rng(0)
    pool = kept.kv_cache_manager.block_pool
    add_requests(kept, range(4), rng)
    step = kept.schedule()
    kept.update_from_output(step, sampled(kept, step, rng))
    assert set(hashes(kept)) != {"None"}
    assert not kept.reset_prefix_cache(), "requests hold blocks"
    assert kept.reset_prefix_cache(reset_running_requests=True) and set(hashes(kept)) == {"None"}
    blocks, pool.blocks = pool.blocks, None
    assert kept.reset_prefix_cache(), "no block was visited"
    pool.blocks = blocks
    step = kept.schedule()
    assert not kept.reset_prefix_cache(), "requests hold blocks again"
    kept.update_from_output(step, sampled(kept, step, rng))
    assert set(hashes(kept)) != {"None"}
    assert kept.reset_prefix_cache(reset_running_requests=True) and set(hashes(kept)) == {"None"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An engine with two full blocks of each prompt in its prefix cache, and two prompts in a step."""
    sizes = {"max_num_batched_tokens": 200, "max_num_seqs": 64}
    yield from live_world(tmp_path_factory.mktemp("keeps"), recompute_kv_cache=False, **sizes)


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


@pytest.mark.slow
def test_more_prompts_than_a_step_has_room_for_get_the_samples_of_their_seeds(world: World):
    """vLLM's core dies when it splits the prompt of a request with a seed, without a GPU (0.32)."""
    params = SamplingParams(max_generate_length=8, temperature=1.0, seed=5)
    prompts = [[4 + (11 * n + k) % 50 for k in range(75 + n)] for n in range(8)]
    together = [one.token_ids for one in run(world.generate(prompts, params))]
    assert [run(world.generate([prompt], params))[0].token_ids for prompt in prompts] == together
    assert len({tuple(ids) for ids in together}) > 1
