"""Blocks of the KV cache: what vLLM need not ask or reset, and running requests that keep theirs at a weight sync.

vLLM (0.26 to 0.33) asks five objects for a block for each request and step, although 15 of 16 tokens need none. That is
a third of what its scheduler does in steps that are not plain (plain_steps.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

ALL = 1 << 60
"""More blocks than a request has."""


def skip_needless_allocations(manager: KVCacheManager) -> None:
    """Replace two methods of `manager` by faster ones with the same results.

    Models with sliding-window or other attention, or with several kinds of blocks, keep vLLM's methods.
    """
    if not has_one_kind_of_block(manager):
        return
    (group,) = manager.coordinator.single_type_managers
    size = group.block_size
    blocks, num_cached = group.req_to_blocks, group.num_cached_block
    allocate_slots, cache_blocks = manager.allocate_slots, manager.cache_blocks

    def is_cached(request: Request, num_tokens: int) -> bool:
        """Whether these tokens add no full block to the prefix cache."""
        return not manager.enable_caching or num_tokens // size <= num_cached.get(request.request_id, 0)

    def allocate_if_needed(
        request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **others: Any
    ) -> KVCacheBlocks | None:
        if not others and num_new_tokens > 0:
            end = request.num_computed_tokens + num_new_tokens
            has_slots = end + num_lookahead_tokens <= size * len(blocks.get(request.request_id, ()))
            if has_slots and is_cached(request, min(end, request.num_tokens)):
                return manager.empty_kv_cache_blocks
        return allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **others)

    def cache_if_needed(request: Request, num_computed_tokens: int) -> None:
        if not is_cached(request, num_computed_tokens):
            cache_blocks(request, num_computed_tokens)

    manager.allocate_slots = allocate_if_needed  # type: ignore[method-assign, assignment]
    manager.cache_blocks = cache_if_needed  # type: ignore[method-assign]


def forget_prefixes(manager: KVCacheManager) -> bool:
    """Empty the prefix cache while requests run, which keep their blocks. Returns: whether vLLM emptied it.

    Later requests find no block from before. Those that run add none any more: their new blocks depend on old ones.
    Only for models of `has_one_kind_of_block`.
    """
    (group,) = manager.coordinator.single_type_managers
    for request_id, blocks in group.req_to_blocks.items():
        if blocks:  # a request without any begins after the sync
            group.num_cached_block[request_id] = ALL
    pool: Any = manager.block_pool
    pool.get_num_free_blocks = lambda: pool.num_gpu_blocks - 1  # vLLM empties it only if no request has a block
    try:
        return manager.reset_prefix_cache()
    finally:
        del pool.get_num_free_blocks


def skip_needless_resets(pool: BlockPool) -> None:
    """Replace the method that empties the prefix cache by one that does not visit all blocks if nothing is cached.

    A weight sync empties it twice while nothing runs, and for 33,000 blocks that takes 2 ms.
    """
    reset: Callable[[], bool] = pool.reset_prefix_cache

    def reset_if_needed() -> bool:
        has_cached = len(pool.cached_block_hash_to_block) > 0
        is_held = pool.get_num_free_blocks() < pool.num_gpu_blocks - 1  # all but the null block
        tells = pool.enable_kv_cache_events or pool.metrics_collector or getattr(pool, "_reuse_watchers", None)
        return reset() if has_cached or is_held or tells else True

    pool.reset_prefix_cache = reset_if_needed  # type: ignore[method-assign]


def has_one_kind_of_block(manager: KVCacheManager) -> bool:
    """Whether all layers have full attention (also to latent vectors) and share one table of blocks."""
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return False
    return bool(groups[0].block_size == manager.block_pool.hash_block_size)
