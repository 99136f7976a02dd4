"""Time of vLLM's attention in a decoding step, by the size of KV-cache blocks and the number of parts of a sequence.

    python -m benchmarks.studies.decode_attention [--sequences 512] [--context 160 384 600]

Needs a GPU for FlashAttention 3. The 28 layers of Qwen3-0.6B's shape, each with a KV cache of its own, in one CUDA
graph. Parts (`num_splits`): 32 is the most that vLLM allows in graphs, 1 means that no sequence is split.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

HEADS, KV_HEADS, HEAD_DIM, LAYERS, LONGEST, REPLAYS = 16, 8, 128, 28, 640, 10


def attention(caches: list[Tensor], table: Tensor, context: int, block: int, parts: int) -> Callable[[], None]:
    """One step of all layers. Args: caches: (2, blocks, block, KV heads, head size) of each layer; table: (sequences,
    blocks of each); context: tokens of each sequence.
    """
    sequences = table.shape[0]
    query = torch.randn(sequences, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    lengths, out = torch.full((sequences,), context, device="cuda", dtype=torch.int32), torch.empty_like(query)
    metadata = get_scheduler_metadata(
        batch_size=sequences,
        max_seqlen_q=1,
        max_seqlen_k=LONGEST,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=block,
        causal=True,
        window_size=(-1, -1),
        num_splits=parts,
    )

    def step() -> None:
        for keys, values in caches:
            flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=LONGEST,
                softmax_scale=HEAD_DIM**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=table,
                scheduler_metadata=metadata,
                fa_version=3,
                num_splits=parts,
            )

    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Mean of replays of a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--context", type=int, nargs="+", default=[160, 384, 600])
    args = parser.parse_args()
    for block in (16, 64, 128):
        of_each = -(-LONGEST // block)
        shape = (2, args.sequences * of_each, block, KV_HEADS, HEAD_DIM)
        caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        order = torch.randperm(args.sequences * of_each, device="cuda")
        table = order.to(torch.int32).view(args.sequences, of_each)
        for context in args.context:
            for parts in (32, 1):
                took = milliseconds(attention(caches, table, context, block, parts))
                read = args.sequences * context * KV_HEADS * HEAD_DIM * 4 * LAYERS
                print(f"blocks of {block:3} context {context:4} parts {parts:2} {took:6.2f} ms {read / took / 1e9:.2f} TB/s")
        del caches


if __name__ == "__main__":
    main()
