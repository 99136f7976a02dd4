"""Causal attention over packed samples in plain torch, with grouped queries and context parallelism.

Legend: T tokens of a pack (each sample padded to the layout's multiple), H query heads, G key/value heads (H a
multiple of G), D head size of queries and keys, E of values. With context parallelism of size C each sample is split
into 2C chunks and rank r holds chunks r and 2C-1-r of every sample (the zig-zag that gives all ranks the same causal
work).
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from skyrl_train.megatron.layers.pack_tables import Half, Rectangle, bounds, global_order, halves, index_tables

T = TypeVar("T", Rectangle, Half)


@dataclass
class PackedSamples(PackedSeqParams):
    """Megatron's description of a pack, and tables of the torch attention, computed by the first layer."""

    lengths: tuple[int, ...] = ()
    """Padded lengths of all samples."""
    cp_rank: int = 0
    cp_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @functools.cached_property
    def tables(self) -> tuple[list[Rectangle], Tensor]:
        """Rectangles of samples, and [T / C] int64: index of each local token among all their rows, end to end."""
        rectangles, scatter = index_tables(list(self.lengths), self.cp_rank, self.cp_size)
        return [self._moved(rectangle) for rectangle in rectangles], self._move(scatter)

    @functools.cached_property
    def global_order(self) -> Tensor:
        """[T] int64: index of each token in the rank-by-rank concatenation of the local packs."""
        return self._move(global_order(list(self.lengths), self.cp_size))

    @functools.cached_property
    def halves(self) -> tuple[Half, Half]:
        first, second = halves(list(self.lengths), self.cp_rank, self.cp_size)
        return self._moved(first), self._moved(second)

    def _moved(self, tables: T) -> T:
        named = {field.name: getattr(tables, field.name) for field in fields(tables)}
        moved: dict[str, Any] = {name: self._move(t) for name, t in named.items() if isinstance(t, Tensor)}
        return replace(tables, **moved)

    def _move(self, table: Tensor) -> Tensor:
        """Copy to the device from pinned memory, without waiting for the device's pending work."""
        if self.device.type != "cuda":
            return table
        return table.pin_memory().to(self.device, non_blocking=True)


def pack_params(
    lengths: list[int], real_lengths: list[int], device: torch.device, *, cp_rank: int, cp_size: int
) -> PackedSamples:
    """Describe a pack of samples with padded `lengths`, of which `real_lengths` are tokens. The torch attention reads
    the lengths, Transformer Engine the cu_seqlens.
    """
    padded = bounds(lengths).to(device)
    real = padded if lengths == real_lengths else bounds(real_lengths).to(device)
    return PackedSamples(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
        cp_rank=cp_rank,
        cp_size=cp_size,
        device=device,
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
    """Arguments for fewer key than query heads, which torch 2.11 accepts without any."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> Tensor:
    """Causal; the last query of a sample is aligned with its last key."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, *bounds, *longest, scale=scale, window_size=(-1, 0), **_grouped_queries())
    assert isinstance(out, Tensor)  # the log-sum-exp is returned only on request
    return out


def attend_halves(
    query: Tensor, key: Tensor, value: Tensor, both: tuple[Half, Half], scale: float, flash: Any = _flash
) -> Tensor:
    """Attention of the local queries to the gathered keys and values, one call per half.
    Args: query [T / C, H, D]; key, value [T, G, D], rank by rank; flash: another implementation, for a test.
    """
    outs = [
        flash(
            query[half.queries],
            key[half.keys],
            value[half.keys],
            (half.query_bounds, half.key_bounds),
            (half.longest_query, half.longest_key),
            scale,
        )
        for half in both
    ]
    order = torch.cat([half.queries for half in both])
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.cat(outs)[inverse]


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSamples, scale: float) -> Tensor:
    """Causal attention of query [T/C, H, D] to key [T/C, G, D] and value [T/C, G, E] of the same sample -> [T/C, H, E].

    On a GPU in half precision it is one FlashAttention call, or two under context parallelism; otherwise one scaled dot
    product per rectangle of samples of similar length.
    """
    cp_size = parallel_state.get_context_parallel_world_size()
    half = query.dtype in (torch.bfloat16, torch.float16)
    flash = query.is_cuda and half and query.shape[-1] == value.shape[-1]
    if cp_size > 1:
        group = parallel_state.get_context_parallel_group()
        key, value = _GatherContext.apply(key, group), _GatherContext.apply(value, group)
        if flash:
            return attend_halves(query, key, value, packed.halves, scale)
        key, value = key[packed.global_order], value[packed.global_order]
    if flash:
        ends, longest = packed.cu_seqlens_q_padded, packed.max_seqlen_q
        return _flash(query, key, value, (ends, ends), (longest, longest), scale)
    rows = []
    rectangles, scatter = packed.tables
    for rectangle in rectangles:
        out = F.scaled_dot_product_attention(
            _take(query, rectangle.queries),
            _take(key, rectangle.keys),
            _take(value, rectangle.keys),
            attn_mask=rectangle.mask,
            is_causal=rectangle.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        rows.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(rows)[scatter]
