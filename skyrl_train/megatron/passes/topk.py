"""The likeliest tokens of logits that are sharded over the vocabulary, and logprobs at given tokens.

Float32 copies exist of one chunk of positions at a time. Among equal logits at the k-th place any may be chosen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.megatron.passes.logprobs import Softmax, VocabParallel, reduce


def vocab_parallel_topk(logits: Tensor, k: int, softmax: Softmax, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The k likeliest of the first `num_candidates` tokens, equal on all ranks of the group.

    Returns: ids [N, k] int32 and logprobs [N, k] float32, normalised over the whole vocabulary; likeliest first.
    """
    group = softmax.group
    first, width = softmax.columns(logits)
    k = min(k, num_candidates)
    own = max(0, min(width, num_candidates - first))
    ids = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), softmax.chunk):
        span = slice(start, start + softmax.chunk)
        scaled = softmax.scaled(logits[span, :width])
        log_z = _log_z(scaled, group)
        best, index = scaled[:, :own].topk(min(k, own))
        pad = k - best.shape[1]
        best = torch.nn.functional.pad(best, (0, pad), value=-torch.inf)
        index = torch.nn.functional.pad(index + first, (0, pad))
        best, order = _gathered(best, group).topk(k)
        ids[span] = _gathered(index, group).gather(1, order).int()
        logprobs[span] = best - log_z[:, None]
    return ids, logprobs


def vocab_parallel_logprobs_at(logits: Tensor, ids: Tensor, softmax: Softmax) -> Tensor:
    """Logprobs [N, k] float32, with gradient, of the tokens `ids` [N, k], which differ at each position."""
    logprobs: Tensor = VocabParallel.apply(logits, ids, softmax, False)[0]
    return logprobs


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
