"""Logprobs and entropy of logits that are sharded over the vocabulary, for the positions of one piece (head.py).

On a GPU one Triton kernel reads the logits once in each direction; elsewhere, and for several tokens per position,
torch computes with float32 copies of the piece.
"""

# ruff: noqa: E741  l is the sum of exponentials, as in papers on online softmax
from __future__ import annotations

from dataclasses import dataclass

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

    def columns(self, shard: int) -> tuple[int, int]:
        """First vocabulary id of this rank's `shard` columns, and how many of them are not padding."""
        first = self.group.rank() * shard
        width = min(shard, self.vocab_size - first)
        assert width > 0, f"tensor-parallel rank {self.group.rank()} holds only padding of {self.vocab_size} tokens"
        return first, width

    def scaled(self, logits: Tensor) -> Tensor:
        """A float32 copy, of float32 logits too: it is modified in place."""
        return logits.to(torch.float32, copy=True).div_(self.temperature)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The k tokens of each position whose logprobs are computed, as seen by one rank."""

    local: Tensor
    """[N, k] int64: columns of this rank's logits, outside 0 .. width - 1 for a token of another rank."""
    width: int
    """Columns that are not padding."""

    @classmethod
    def of(cls, ids: Tensor, shard: int, softmax: Softmax) -> Tokens:
        """Args: ids [N, k] in the whole vocabulary; shard: columns of this rank."""
        first, width = softmax.columns(shard)
        return cls(ids.long() - first, width)

    def __getitem__(self, span: slice) -> Tokens:
        return Tokens(self.local[span], self.width)

    @property
    def here(self) -> Tensor:
        """[N, k] bool: tokens of this rank."""
        return (self.local >= 0) & (self.local < self.width)

    @property
    def index(self) -> Tensor:
        """[N, k] int64: `local`, any valid column for a token of another rank."""
        return self.local.clamp(0, self.width - 1)


def has_kernel(tensor: Tensor, k: int) -> bool:
    """Whether a Triton kernel computes the logprobs of k tokens per position."""
    return k == 1 and kernels.serve(tensor)


def statistics(logits: Tensor, tokens: Tokens, softmax: Softmax, *, with_entropy: bool) -> Tensor:
    """Return [3 + k, N] float32 of x = logits / temperature without padding, from this rank's columns alone.

    Rows: the maximum m; l = sum(exp(x - m)); s = sum((x - m) exp(x - m)), 0 unless with_entropy; and x - m of each
    token, 0 for those of other ranks.
    """
    if has_kernel(logits, tokens.local.shape[1]):
        from skyrl_train.kernels.vocabulary import statistics as in_one_kernel

        local = tokens.local[:, 0].contiguous()
        rows = in_one_kernel(logits, local, tokens.width, softmax.temperature, with_entropy=with_entropy)
        return torch.stack(rows)
    x = softmax.scaled(logits[:, : tokens.width])
    m = x.amax(-1)
    x.sub_(m[:, None])
    chosen = x.gather(1, tokens.index).masked_fill_(~tokens.here, 0)
    exp = x.exp()
    l = exp.sum(-1)
    s = x.mul_(exp).sum(-1) if with_entropy else torch.zeros_like(l)
    return torch.stack([m, l, s, *chosen.unbind(1)])


def joined(parts: Tensor, tokens: Tokens, softmax: Softmax, *, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Join the statistics of all ranks; a collective over the tensor-parallel group.

    Returns: logprobs [N, k], entropy [N] in nats (0 unless with_entropy) and log_z [N], the log of the sum of
    exponentials over the whole vocabulary; the same on every rank.
    """
    m, sums = parts[0], parts[1:]
    if softmax.group.size() > 1:
        m = m.clone()
        dist.all_reduce(m, op=dist.ReduceOp.MAX, group=softmax.group)
        shift = parts[0] - m
        l, s, *chosen = parts[1:].unbind()
        rescale = shift.exp()
        moved = [torch.where(here, each + shift, 0.0) for here, each in zip(tokens.here.unbind(1), chosen, strict=True)]
        sums = torch.stack([l * rescale, (s + shift * l) * rescale, *moved])
        dist.all_reduce(sums, group=softmax.group)
    l, s = sums[0], sums[1]
    log_sum = l.log()
    entropy = log_sum - s / l if with_entropy else torch.zeros_like(log_sum)
    return (sums[2:] - log_sum).t().contiguous(), entropy, log_sum + m


@dataclass(frozen=True, slots=True)
class Upstream:
    """What the gradient of logits depends on besides them, for N positions."""

    log_z: Tensor
    entropy: Tensor
    logprobs: Tensor
    """[N, k] float32: gradient of the logprobs."""
    entropies: Tensor | None
    """[N] float32: gradient of the entropy; None if there is none."""

    def __getitem__(self, span: slice) -> Upstream:
        entropies = None if self.entropies is None else self.entropies[span]
        return Upstream(self.log_z[span], self.entropy[span], self.logprobs[span], entropies)


def replace_by_gradient(logits: Tensor, tokens: Tokens, softmax: Softmax, up: Upstream) -> None:
    """Overwrite contiguous logits [N, V / tp] by their gradient, which is 0 in padding columns."""
    if has_kernel(logits, tokens.local.shape[1]):
        from skyrl_train.kernels.vocabulary import replace_by_gradient as in_one_kernel

        local, upstream = tokens.local[:, 0].contiguous(), up.logprobs[:, 0].contiguous()
        in_one_kernel(logits, local, up.log_z, up.entropy, upstream, up.entropies, tokens.width, softmax.temperature)
        return
    log_p = softmax.scaled(logits[:, : tokens.width]).sub_(up.log_z[:, None])
    total = up.logprobs.sum(-1, keepdim=True)
    if up.entropies is None:
        grad = log_p.exp_().mul_(-total)
    else:
        grad = log_p.exp()
        # dH/dx_j = -p_j (log p_j + H)
        part = log_p.add_(up.entropy[:, None]).mul_(up.entropies[:, None])
        grad.mul_(part.add_(total).neg_())
    grad.scatter_add_(1, tokens.index, up.logprobs * tokens.here)
    logits[:, : tokens.width] = grad.div_(softmax.temperature)
    logits[:, tokens.width :] = 0
