"""The likeliest tokens of logits that are sharded over the vocabulary, and logprobs at given tokens.

Float32 copies exist of one chunk of positions at a time. Among equal logits at the k-th place any may be chosen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.megatron.passes.logprobs import columns, float32_copy, reduce


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    group: dist.ProcessGroup,
    *,
    temperature: float,
    chunk: int,
    vocab_size: int,
    num_candidates: int,
) -> tuple[Tensor, Tensor]:
    """The k likeliest of the first `num_candidates` tokens, equal on all ranks of the group.

    Args: like `vocab_parallel_logprobs`.
    Returns: ids [N, k] int32 and logprobs [N, k] float32, normalised over the whole vocabulary; likeliest first.
    """
    first, width = columns(logits, group, vocab_size)
    k = min(k, num_candidates)
    own = max(0, min(width, num_candidates - first))
    ids = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), chunk):
        span = slice(start, start + chunk)
        scaled = float32_copy(logits[span, :width]).div_(temperature)
        log_z = _log_z(scaled, group)
        best, index = scaled[:, :own].topk(min(k, own))
        pad = k - best.shape[1]
        best = torch.nn.functional.pad(best, (0, pad), value=-torch.inf)
        index = torch.nn.functional.pad(index + first, (0, pad))
        best, order = _gathered(best, group).topk(k)
        ids[span] = _gathered(index, group).gather(1, order).int()
        logprobs[span] = best - log_z[:, None]
    return ids, logprobs


def vocab_parallel_logprobs_at(
    logits: Tensor, ids: Tensor, group: dist.ProcessGroup, *, temperature: float, chunk: int, vocab_size: int
) -> Tensor:
    """Logprobs [N, k] float32, with gradient, of the tokens `ids` [N, k], which differ at each position.

    Args: like `vocab_parallel_logprobs`.
    """
    result: Tensor = _LogprobsAt.apply(logits, ids, group, temperature, chunk, vocab_size)
    return result


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        group: dist.ProcessGroup,
        temperature: float,
        chunk: int,
        vocab_size: int,
    ) -> Tensor:
        first, width = columns(logits, group, vocab_size)
        local = ids.long() - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        log_z = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        result = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        for start in range(0, len(logits), chunk):
            span = slice(start, start + chunk)
            scaled = float32_copy(logits[span, :width]).div_(temperature)
            chosen = scaled.gather(1, local[span]).masked_fill_(~here[span], 0)
            log_z[span] = _log_z(scaled, group)
            reduce(chosen, dist.ReduceOp.SUM, group)
            result[span] = chosen - log_z[span, None]
        ctx.save_for_backward(logits, local, here, log_z)
        ctx.temperature, ctx.chunk, ctx.width = temperature, chunk, width
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grads
        logits, local, here, log_z = ctx.saved_tensors
        out = torch.empty_like(logits)
        out[:, ctx.width :] = 0
        for start in range(0, len(logits), ctx.chunk):
            span = slice(start, start + ctx.chunk)
            p = float32_copy(logits[span, : ctx.width]).div_(ctx.temperature).sub_(log_z[span, None]).exp_()
            grad = p.mul_(-upstream[span].sum(-1, keepdim=True))
            grad.scatter_add_(1, local[span], upstream[span] * here[span])
            out[span, : ctx.width] = grad.div_(ctx.temperature)
        return out, None, None, None, None, None


def _log_z(scaled: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N]: log of the sum of exponentials over the whole vocabulary."""
    m = scaled.amax(-1)
    reduce(m, dist.ReduceOp.MAX, group)
    total = scaled.sub(m[:, None]).exp_().sum(-1)
    reduce(total, dist.ReduceOp.SUM, group)
    return total.log_().add_(m)


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, k] of each rank -> [N, k * ranks], in the order of the ranks."""
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
