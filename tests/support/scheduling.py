"""vLLM's scheduler without a model: requests, steps and what a model would answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK, MAX_LEN, EOS, STOP = 8, 96, 5, 6


def scheduler(model: Path, kind: Any, *, num_blocks: int, caching: bool) -> Any:
    """Args: kind: its class."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

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
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def add_requests(scheduler: Any, names: range, rng: np.random.Generator, *, can_stop: bool = False) -> None:
    """Of random lengths, some with a prefix of others. Args: can_stop: whether tokens end some of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, sha256)
    for index in names:
        prompt = [index % 3] * int(rng.integers(1, 40))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 90)) + index % 7,
            ignore_eos=not (can_stop and index % 2),
            stop_token_ids=[STOP] if can_stop and index % 3 == 0 else None,
            min_tokens=index % 7,
            logprobs=0 if index % 4 else None,
            output_kind=RequestOutputKind.FINAL_ONLY if index % 3 else RequestOutputKind.DELTA,
        )
        params.update_from_generation_config({}, EOS)
        scheduler.add_request(Request(str(index), prompt, params, None, block_hasher=hasher, arrival_time=index))


def hashes(scheduler: Any) -> list[str]:
    """Of each block: what the prefix cache knows it by."""
    return [str(block.block_hash) for block in scheduler.kv_cache_manager.block_pool.blocks]


def sampled(scheduler: Any, step: Any, rng: np.random.Generator, num_ids: int = 9) -> Any:
    """Output of a step that was just scheduled, in any order: tokens below `num_ids`, and any logprobs."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    ids = rng.permutation(list(step.num_scheduled_tokens)).tolist()
    tokens = [[int(rng.integers(num_ids))] * (not scheduler.requests[each].is_prefill_chunk) for each in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(
            rng.integers(99, size=(len(ids), 1), dtype=np.int32),
            rng.random((len(ids), 1), dtype=np.float32),
            rng.integers(99, size=len(ids), dtype=np.int32),
        ),
        prompt_logprobs_dict={},
        pooler_output=[],
    )
