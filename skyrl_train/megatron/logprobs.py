"""Logprobs and entropy of logits that are split over the vocabulary.

Float32 copies of the logits exist for one chunk of positions at a time, in forward and in backward; what is kept
between them is the logits themselves and two floats per position. The backward pass writes a new gradient tensor: the
logits saved for backward are never modified.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


def _float32(logits: Tensor) -> Tensor:
    """A copy, also of float32 logits: it is worked on in place, and the logits are saved for backward."""
    return logits.to(torch.float32, copy=True)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        num, shard = logits.shape
        first = group.rank() * shard
        width = min(shard, vocab_size - first)
        assert width > 0, f"tensor-parallel rank {group.rank()} holds nothing but padding of {vocab_size} words"
        local = labels - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        logprobs, log_z = (torch.empty(num, dtype=torch.float32, device=logits.device) for _ in range(2))
        entropy = torch.zeros(num, dtype=torch.float32, device=logits.device)
        for start in range(0, num, chunk):
            span = slice(start, start + chunk)
            shifted = _float32(logits[span, :width]).div_(temperature)
            peak = shifted.amax(-1)
            _reduce(peak, dist.ReduceOp.MAX, group)
            shifted.sub_(peak[:, None])
            target = shifted.gather(1, local[span, None])[:, 0] * here[span]
            exp = shifted.exp()
            # one collective carries the sum of exponentials, the target's logit and the entropy's numerator
            parts = [exp.sum(-1), target]
            if with_entropy:
                parts.append(shifted.mul_(exp).sum(-1))
            sums = torch.stack(parts)
            _reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            logprobs[span] = sums[1] - log_sum
            log_z[span] = log_sum + peak
            if with_entropy:
                entropy[span] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(logits, local, here, log_z, entropy)
        ctx.temperature, ctx.chunk, ctx.with_entropy, ctx.width = temperature, chunk, with_entropy, width
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        logits, local, here, log_z, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        out[:, ctx.width :] = 0
        rows = torch.arange(len(logits), device=logits.device)
        for start in range(0, len(logits), ctx.chunk):
            span = slice(start, start + ctx.chunk)
            log_p = _float32(logits[span, : ctx.width]).div_(ctx.temperature).sub_(log_z[span, None])
            grad = log_p.exp()
            if ctx.with_entropy:
                # dH/dx_j = -p_j (log p_j + H)
                entropy_part = log_p.add_(entropy[span, None]).mul_(grad_entropy[span, None])
                grad.mul_(entropy_part.add_(grad_logprobs[span, None]).neg_())
            else:
                grad.mul_(-grad_logprobs[span, None])
            grad[rows[: len(grad)], local[span]] += grad_logprobs[span] * here[span]
            out[span, : ctx.width] = grad.div_(ctx.temperature)
        return out, None, None, None, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    *,
    temperature: float,
    chunk: int,
    with_entropy: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Logprob of each label and entropy of each position's distribution softmax(logits / temperature).

    Args: logits [N, V / tp] of this rank, any float dtype; labels [N] int64 in the whole vocabulary; group: the
    tensor-parallel group; chunk: positions whose float32 copies exist at a time; vocab_size: words of the
    model, the columns after them only make the shards equal and are not part of the distribution.
    Returns: logprobs [N] float32 and entropy [N] float32 in nats (0 and without gradient unless with_entropy), the
    same on every rank of the group.
    """
    return _VocabParallel.apply(logits, labels, group, temperature, chunk, with_entropy, vocab_size)
