"""Causal attention over packed samples in plain torch, with grouped queries and context parallelism.

Legend: T tokens of a pack (each sample padded to the layout's multiple), H query heads, G key/value heads (H a
multiple of G), D head size of queries and keys, E of values. With context parallelism of size C each sample is cut
into 2C chunks and rank r holds chunks r and 2C-1-r of every sample (the zig-zag that gives all ranks the same causal
work).
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples of similar length, as rows of a rectangle."""

    queries: Tensor
    """[b, Lq] int64: index in the local pack [T / C]; T / C where the row is padded."""
    keys: Tensor
    """[b, Lk] int64: index in the whole pack [T]; T where the row is padded."""
    mask: Tensor | None
    """[b, 1, Lq, Lk] bool, True where a query may see a key; None where plain causal order says it (C = 1)."""


@dataclass
class PackedSamples(PackedSeqParams):
    """Megatron's description of a pack, with the index tables of the torch attention, made once per micro-batch."""

    buckets: tuple[Bucket, ...] = ()
    scatter: Tensor | None = None
    """[T / C] int64: place of each local token among the flattened rows of all buckets."""
    global_order: Tensor | None = None
    """[T] int64: place of each token in the rank-by-rank concatenation of the local packs; None if C = 1."""


def zigzag(lengths: list[int], cp_rank: int, cp_size: int) -> Tensor:
    """[T / C] int64: places in the pack of the tokens that rank `cp_rank` holds. Lengths are multiples of 2C."""
    parts, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        parts.append(torch.arange(start + cp_rank * chunk, start + (cp_rank + 1) * chunk))
        last = 2 * cp_size - 1 - cp_rank
        parts.append(torch.arange(start + last * chunk, start + (last + 1) * chunk))
        start += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _rows(starts: Tensor, lengths: Tensor, width: int, sentinel: int) -> tuple[Tensor, Tensor]:
    columns = torch.arange(width)
    inside = columns < lengths[:, None]
    return torch.where(inside, starts[:, None] + columns, sentinel), inside


def index_tables(lengths: list[int], cp_rank: int, cp_size: int) -> tuple[tuple[Bucket, ...], Tensor]:
    """Buckets by power of two of the length, so that a rectangle wastes less than half, and the `scatter` table."""
    all_lengths = torch.tensor(lengths)
    local_lengths = all_lengths // cp_size
    starts = torch.cumsum(all_lengths, 0) - all_lengths
    local_starts = torch.cumsum(local_lengths, 0) - local_lengths
    total, local_total = int(all_lengths.sum()), int(local_lengths.sum())
    order = zigzag(lengths, cp_rank, cp_size) if cp_size > 1 else None
    classes = torch.tensor([max(length - 1, 0).bit_length() for length in lengths])
    scatter = torch.empty(local_total, dtype=torch.int64)
    buckets, offset = [], 0
    for size in classes.unique().tolist():
        chosen = torch.nonzero(classes == size).flatten()
        width = int(all_lengths[chosen].max())
        keys, keys_inside = _rows(starts[chosen], all_lengths[chosen], width, total)
        queries, inside = _rows(local_starts[chosen], local_lengths[chosen], width // cp_size, local_total)
        mask = None
        if order is not None:
            position = torch.cat([order, torch.tensor([-1])])[queries] - starts[chosen][:, None]
            mask = (position[:, :, None] >= torch.arange(width)) & keys_inside[:, None, :]
            # A padded query row sees the first key, so that its softmax is defined; nothing reads it.
            mask[..., 0] |= ~inside
            mask = mask[:, None]
        buckets.append(Bucket(queries, keys, mask))
        flat = queries.flatten()
        places = torch.arange(len(flat)) + offset
        scatter[flat[inside.flatten()]] = places[inside.flatten()]
        offset += len(flat)
    return tuple(buckets), scatter


def pack_params(
    lengths: list[int],
    real_lengths: list[int],
    device: torch.device,
    *,
    cp_rank: int,
    cp_size: int,
    torch_attention: bool,
) -> PackedSamples:
    """Describe a pack of samples with padded `lengths` of which `real_lengths` are tokens.

    The torch attention reads the index tables; Transformer Engine reads the cu_seqlens.
    """

    def bounds(values: list[int]) -> Tensor:
        return F.pad(torch.tensor(values, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)

    padded = bounds(lengths)
    real = padded if lengths == real_lengths else bounds(real_lengths)
    buckets: tuple[Bucket, ...] = ()
    scatter: Tensor | None = None
    global_order: Tensor | None = None
    if torch_attention:
        buckets, scatter = index_tables(lengths, cp_rank, cp_size)
        buckets = tuple(
            Bucket(b.queries.to(device), b.keys.to(device), None if b.mask is None else b.mask.to(device))
            for b in buckets
        )
        scatter = scatter.to(device)
        if cp_size > 1:
            by_rank = torch.cat([zigzag(lengths, rank, cp_size) for rank in range(cp_size)])
            global_order = torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank))).to(device)
    return PackedSamples(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        buckets=buckets,
        scatter=scatter,
        global_order=global_order,
    )


class _GatherContext(torch.autograd.Function):
    """All-gather of [t, G, D] over the context-parallel group; the gradient is reduced and scattered back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
        dist.all_gather_into_tensor(out, local.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        local = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad, group=ctx.group)
        return local, None


def _take(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor [T, G, D] at rows [b, L] (T means a zero row) -> [b, G, L, D]."""
    padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    return padded[rows].transpose(1, 2)


@functools.cache
def _grouped_queries() -> dict[str, Any]:
    """torch 2.11 takes fewer key than query heads as they are; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash_varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSamples, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = packed.cu_seqlens_q_padded, packed.max_seqlen_q
    out = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **_grouped_queries()
    )
    assert isinstance(out, Tensor)  # the log-sum-exp comes only where it is asked for
    return out


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSamples, scale: float) -> Tensor:
    """Causal attention of query [T/C, H, D] to key [T/C, G, D] and value [T/C, G, E] of the same sample -> [T/C, H, E].

    On a GPU in half precision without context parallelism it is one FlashAttention call; elsewhere a scaled dot product
    per bucket of samples of similar length.
    """
    cp_size = parallel_state.get_context_parallel_world_size()
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and cp_size == 1 and query.shape[-1] == value.shape[-1]:
        return _flash_varlen(query, key, value, packed, scale)
    if cp_size > 1:
        group = parallel_state.get_context_parallel_group()
        assert packed.global_order is not None
        key = _GatherContext.apply(key, group)[packed.global_order]
        value = _GatherContext.apply(value, group)[packed.global_order]
    rows = []
    for bucket in packed.buckets:
        out = F.scaled_dot_product_attention(
            _take(query, bucket.queries),
            _take(key, bucket.keys),
            _take(value, bucket.keys),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        rows.append(out.transpose(1, 2).flatten(0, 1))
    assert packed.scatter is not None
    return torch.cat(rows)[packed.scatter]
