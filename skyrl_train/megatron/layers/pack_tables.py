"""Index tables of the torch attention, computed on the host from the lengths of the packed samples. Legend as in
attention.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Samples of similar length, as rows of a rectangle."""

    queries: Tensor
    """[b, Lq] int64: index in the local pack [T / C]; T / C at padding."""
    keys: Tensor
    """[b, Lk] int64: index in the whole pack [T]; T at padding."""
    mask: Tensor | None
    """[b, 1, Lq, Lk] bool, True where a query may attend to a key; None for plain causal order (C = 1)."""


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two chunks that a context-parallel rank holds of every sample, for one FlashAttention call."""

    queries: Tensor
    """[T / 2C] int64: index in the local pack."""
    keys: Tensor
    """int64: visible keys, as indices in the rank-by-rank concatenation of the local packs."""
    query_bounds: Tensor
    key_bounds: Tensor
    """[B + 1] int32 each"""
    longest_query: int
    longest_key: int


def zigzag(lengths: list[int], cp_rank: int, cp_size: int) -> Tensor:
    """[T / C] int64: positions in the pack of the tokens of rank `cp_rank`. Lengths are multiples of 2C."""
    parts, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        parts.append(torch.arange(start + cp_rank * chunk, start + (cp_rank + 1) * chunk))
        last = 2 * cp_size - 1 - cp_rank
        parts.append(torch.arange(start + last * chunk, start + (last + 1) * chunk))
        start += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def global_order(lengths: list[int], cp_size: int) -> Tensor:
    by_rank = torch.cat([zigzag(lengths, rank, cp_size) for rank in range(cp_size)])
    return torch.empty_like(by_rank).scatter_(0, by_rank, torch.arange(len(by_rank)))


def halves(lengths: list[int], cp_rank: int, cp_size: int) -> tuple[Half, Half]:
    """The rank's first chunks of all samples with the keys up to their end, and its second chunks with theirs.
    FlashAttention's causal mask aligns the last query with the last key, as a chunk after its prefix needs.
    """
    order = global_order(lengths, cp_size)
    starts = [0, *itertools.accumulate(lengths)]
    parts = []
    for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        sizes = [length // (2 * cp_size) for length in lengths]
        seen = [(chunk + 1) * size for size in sizes]
        local = [start // cp_size + half * size for start, size in zip(starts, sizes, strict=False)]
        queries = [torch.arange(first, first + size) for first, size in zip(local, sizes, strict=True)]
        keys = [order[start : start + num] for start, num in zip(starts, seen, strict=False)]
        parts.append(Half(torch.cat(queries), torch.cat(keys), bounds(sizes), bounds(seen), max(sizes), max(seen)))
    return parts[0], parts[1]


def bounds(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def _rows(starts: Tensor, lengths: Tensor, width: int, sentinel: int) -> tuple[Tensor, Tensor]:
    columns = torch.arange(width)
    inside = columns < lengths[:, None]
    return torch.where(inside, starts[:, None] + columns, sentinel), inside


def index_tables(lengths: list[int], cp_rank: int, cp_size: int) -> tuple[tuple[Rectangle, ...], Tensor]:
    """Rectangles by power of two of the length, so that less than half is padding, and the `scatter` table."""
    all_lengths = torch.tensor(lengths)
    local_lengths = all_lengths // cp_size
    starts = torch.cumsum(all_lengths, 0) - all_lengths
    local_starts = torch.cumsum(local_lengths, 0) - local_lengths
    total, local_total = int(all_lengths.sum()), int(local_lengths.sum())
    order = zigzag(lengths, cp_rank, cp_size) if cp_size > 1 else None
    classes = torch.tensor([max(length - 1, 0).bit_length() for length in lengths])
    scatter = torch.empty(local_total, dtype=torch.int64)
    rectangles, offset = [], 0
    for size in classes.unique().tolist():
        chosen = torch.nonzero(classes == size).flatten()
        width = int(all_lengths[chosen].max())
        keys, keys_inside = _rows(starts[chosen], all_lengths[chosen], width, total)
        queries, inside = _rows(local_starts[chosen], local_lengths[chosen], width // cp_size, local_total)
        mask = None
        if order is not None:
            position = torch.cat([order, torch.tensor([-1])])[queries] - starts[chosen][:, None]
            mask = (position[:, :, None] >= torch.arange(width)) & keys_inside[:, None, :]
            # A padding query attends to the first key, so that its softmax is defined; nothing reads it.
            mask[..., 0] |= ~inside
            mask = mask[:, None]
        rectangles.append(Rectangle(queries, keys, mask))
        flat = queries.flatten()
        rows = torch.arange(len(flat)) + offset
        scatter[flat[inside.flatten()]] = rows[inside.flatten()]
        offset += len(flat)
    return tuple(rectangles), scatter
