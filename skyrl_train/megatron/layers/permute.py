"""Permutation of tokens to their experts and back, in place of that of Megatron's dispatchers.

Without Transformer Engine's kernels (`moe_permute_fusion`) Megatron sums the rows of one token (expert outputs in
forward, gradients in backward) with atomic additions in half precision. Here one kernel sums them in float32,
deterministically. Chunks that are in order already are not copied.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_train import kernels
from skyrl_train.megatron.layers.expert_rows import ExpertRows


@dataclass(frozen=True, slots=True)
class Permutation:
    """Order of M rows for T tokens; Megatron's dispatchers keep it in place of their sorted indices."""

    token_of_row: Tensor
    """[M] int64: rows are ordered by expert, then by token."""
    row_of_copy: Tensor
    """[M] int64: rows of the first token, then those of the second, and so on."""
    bounds: Tensor
    """[T + 1] int64: start of each token's rows in `row_of_copy`, and the end of the last."""

    @classmethod
    def of(cls, routing_map: Tensor, num_rows: int) -> tuple[Permutation, Tensor]:
        """Return the permutation and its [M] int64 indices into the transposed map. No copy to the host.
        Args: routing_map [T, E] bool with `num_rows` true values.
        """
        num_tokens = len(routing_map)
        flat = routing_map.t().reshape(-1).argsort(descending=True, stable=True)[:num_rows]
        token_of_row = flat % max(num_tokens, 1)
        row_of_copy = token_of_row.int().argsort(stable=True)
        bounds = routing_map.new_zeros(num_tokens + 1, dtype=torch.int64)
        torch.cumsum(routing_map.sum(1), 0, out=bounds[1:])
        return cls(token_of_row, row_of_copy, bounds), flat


class _ToExperts(torch.autograd.Function):
    """Copies the tokens' rows in forward, sums them in backward; `_FromExperts` is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return x.index_select(0, permutation.token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sums(grads[0], ctx.permutation), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return _sums(x, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.permutation.token_of_row), None


def _sums(x: Tensor, permutation: Permutation) -> Tensor:
    from skyrl_train.kernels import rows

    return rows.sums(x.contiguous(), permutation.row_of_copy, permutation.bounds)


def permute(
    megatrons: Callable[..., Any],
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    """Megatron's `permute`: (rows, their probabilities, the permutation), and in 0.19 two values more."""
    counted = isinstance(num_out_tokens, int)
    if fused or drop_and_pad or not counted or not kernels.serve(tokens):
        return megatrons(
            tokens,
            routing_map,
            probs=probs,
            num_out_tokens=num_out_tokens,
            fused=fused,
            drop_and_pad=drop_and_pad,
            **more,
        )
    permutation, flat = Permutation.of(routing_map, num_out_tokens)
    rows = _ToExperts.apply(tokens, permutation)
    chosen = None if probs is None else probs.t().reshape(-1).index_select(0, flat)
    beyond = (None, more.get("tokens_per_expert")) if "align_size" in inspect.signature(megatrons).parameters else ()
    return rows, chosen, permutation, *beyond


def unpermute(megatrons: Callable[..., Tensor], rows: Tensor, permutation: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Megatron's `unpermute`: [T, H], the sum of each token's rows."""
    if not isinstance(permutation, Permutation):
        return megatrons(rows, permutation, *args, **kwargs)
    assert kwargs.get("probs") is None, "the experts' outputs are weighted already"
    return _FromExperts.apply(rows, permutation)


def sort_chunks(
    megatrons: Callable[..., Any], x: Tensor, split_sizes: Tensor, order: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Megatron's `sort_chunks_by_idxs`; without expert parallelism the chunks are sorted already."""
    if not order.is_cuda and torch.equal(order, torch.arange(len(order))):
        return x, args[0] if args else kwargs.get("probs")
    return megatrons(x, split_sizes, order, *args, **kwargs)


def counts(megatrons: Callable[..., Any], dispatcher: Any, point: str, per_expert: Any = None) -> Any:
    """What Megatron does with the counts at a point of a dispatch; at the last the experts get `ExpertRows`.

    Megatron copies them to the host and waits. Only ranks that exchange tokens need them there.
    """
    config = dispatcher.config
    needs_counts = config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization
    if dispatcher.ep_size > 1 or dispatcher.tp_size > 1 or needs_counts or not _are_grouped(config):
        per_expert = megatrons(dispatcher, point, per_expert)
    if point != "before_finish" or not _are_grouped(config):
        return per_expert
    return ExpertRows(per_expert if per_expert.is_cuda else per_expert.tolist())


def _are_grouped(config: Any) -> bool:
    """Whether `GroupedLinear` multiplies the experts' rows as they are."""
    return config.moe_grouped_gemm and not (config.fp8 or config.fp4)


@functools.cache
def install() -> None:
    """Make Megatron's dispatchers of this process call these."""
    from megatron.core.transformer.moe import token_dispatcher as dispatcher

    alltoall = dispatcher.MoEAlltoAllTokenDispatcher
    synchronize = alltoall._maybe_dtoh_and_synchronize
    alltoall._maybe_dtoh_and_synchronize = lambda *given: counts(synchronize, *given)

    dispatcher.permute = functools.partial(permute, dispatcher.permute)
    dispatcher.unpermute = functools.partial(unpermute, dispatcher.unpermute)
    dispatcher.sort_chunks_by_idxs = functools.partial(sort_chunks, dispatcher.sort_chunks_by_idxs)
