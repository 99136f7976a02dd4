"""Logprobs and entropy of logits that are sharded over the vocabulary.

On a GPU one Triton kernel reads the logits once in each direction; elsewhere float32 copies exist of one chunk of
positions at a time. The logits and two floats per position are saved for backward, which never modifies the logits.
"""

# ruff: noqa: E741  l is the sum of exponentials, as in papers on online softmax
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train import kernels


@dataclass(frozen=True, slots=True)
class Softmax:
    """The distribution softmax(logits / temperature); each rank of a group has logits [N, V / tp] of any dtype."""

    group: dist.ProcessGroup
    """The tensor-parallel group."""
    vocab_size: int
    """Without padding columns, which are not part of the distribution."""
    temperature: float
    chunk: int
    """Positions per float32 copy."""

    def columns(self, logits: Tensor) -> tuple[int, int]:
        """First vocabulary id of this shard, and how many of its columns are not padding."""
        shard = logits.shape[1]
        first = self.group.rank() * shard
        width = min(shard, self.vocab_size - first)
        assert width > 0, f"tensor-parallel rank {self.group.rank()} holds only padding of {self.vocab_size} tokens"
        return first, width

    def scaled(self, logits: Tensor) -> Tensor:
        """A float32 copy, of float32 logits too: it is modified in place, and the logits are saved for backward."""
        return logits.to(torch.float32, copy=True).div_(self.temperature)


def reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


class VocabParallel(torch.autograd.Function):
    """Logprobs of k tokens per position, which differ from each other, and the entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, softmax: Softmax, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Args: ids [N, k]. Returns: [N, k] and [N] float32."""
        (num, k), device, group = ids.shape, logits.device, softmax.group
        first, width = softmax.columns(logits)
        local = ids.long() - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        logprobs = torch.empty(num, k, dtype=torch.float32, device=device)
        log_z, entropy = torch.zeros(2, num, dtype=torch.float32, device=device).unbind()
        for start in range(0, num, softmax.chunk):
            span = slice(start, start + softmax.chunk)
            shifted = softmax.scaled(logits[span, :width])
            m = shifted.amax(-1)
            reduce(m, dist.ReduceOp.MAX, group)
            shifted.sub_(m[:, None])
            chosen = shifted.gather(1, local[span]).masked_fill_(~here[span], 0)
            exp = shifted.exp()
            # One collective for the tokens' logits, the sum of exponentials and the entropy's numerator.
            parts = [*chosen.unbind(1), exp.sum(-1)]
            if with_entropy:
                parts.append(shifted.mul_(exp).sum(-1))
            sums = torch.stack(parts)
            reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[k].log()
            logprobs[span] = (sums[:k] - log_sum).t()
            log_z[span] = log_sum + m
            if with_entropy:
                entropy[span] = log_sum - sums[k + 1] / sums[k]
        ctx.save_for_backward(logits, local, here, log_z, entropy)
        ctx.softmax, ctx.with_entropy, ctx.width = softmax, with_entropy, width
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        logits, local, here, log_z, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        out[:, ctx.width :] = 0
        for start in range(0, len(logits), ctx.softmax.chunk):
            span = slice(start, start + ctx.softmax.chunk)
            log_p = ctx.softmax.scaled(logits[span, : ctx.width]).sub_(log_z[span, None])
            grad = log_p.exp() if ctx.with_entropy else log_p.exp_()
            upstream = grad_logprobs[span]
            if ctx.with_entropy:
                # dH/dx_j = -p_j (log p_j + H)
                entropy_part = log_p.add_(entropy[span, None]).mul_(grad_entropy[span, None])
                grad.mul_(entropy_part.add_(upstream.sum(-1, keepdim=True)).neg_())
            else:
                grad.mul_(-upstream.sum(-1, keepdim=True))
            grad.scatter_add_(1, local[span], upstream * here[span])
            out[span, : ctx.width] = grad.div_(ctx.softmax.temperature)
        return out, None, None, None


class _FusedVocabParallel(torch.autograd.Function):
    """`VocabParallel` of one token per position, with one kernel in each direction."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, softmax: Softmax, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        from skyrl_train.kernels.vocabulary import statistics

        group = softmax.group
        first, width = softmax.columns(logits)
        local = labels - first
        m, l, s, target = statistics(logits, local, width, softmax.temperature, with_entropy=with_entropy)
        if group.size() > 1:
            m_all = m.clone()
            dist.all_reduce(m_all, op=dist.ReduceOp.MAX, group=group)
            shift = m - m_all
            rescale = shift.exp()
            here = (local >= 0) & (local < width)
            sums = torch.stack([l * rescale, (s + shift * l) * rescale, torch.where(here, target + shift, 0.0)])
            dist.all_reduce(sums, group=group)
            (l, s, target), m = sums.unbind(), m_all
        log_sum = l.log()
        logprobs, log_z = target - log_sum, log_sum + m
        entropy = log_sum - s / l if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(logits, local, log_z, entropy)
        ctx.temperature, ctx.with_entropy, ctx.width = softmax.temperature, with_entropy, width
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from skyrl_train.kernels.vocabulary import gradient

        logits, local, log_z, entropy = ctx.saved_tensors
        # An expanded gradient (of a sum) has stride 0.
        up, up_entropy = (grad.contiguous() for grad in grads)
        inputs = logits, local, log_z, entropy, up, up_entropy
        out = gradient(*inputs, ctx.width, ctx.temperature, with_entropy=ctx.with_entropy)
        return out, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, softmax: Softmax, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Logprob of each label and entropy of each position's distribution.

    Args: labels [N] int64 in the whole vocabulary.
    Returns: logprobs [N] float32 and entropy [N] float32 in nats (0 and without gradient unless with_entropy), the
    same on every rank of the group.
    """
    if kernels.serve(logits):
        return _FusedVocabParallel.apply(logits, labels, softmax, with_entropy)
    logprobs, entropy = VocabParallel.apply(logits, labels[:, None], softmax, with_entropy)
    return logprobs[:, 0], entropy
