"""The likeliest tokens of logits that are sharded over the vocabulary.

Among equal logits at the k-th place any may be chosen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.megatron.passes.logprobs import Softmax


def topk(logits: Tensor, k: int, log_z: Tensor, softmax: Softmax, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The k likeliest of the first `num_candidates` tokens, equal on all ranks of the group.

    Args: log_z [N]: log of the sum of exponentials over the whole vocabulary.
    Returns: ids [N, k] int32 and logprobs [N, k] float32, normalised over the whole vocabulary; likeliest first.
    """
    first, width = softmax.columns(logits.shape[1])
    k = min(k, num_candidates)
    own = max(0, min(width, num_candidates - first))
    best, index = logits[:, :own].topk(min(k, own))
    pad = k - best.shape[1]
    best = torch.nn.functional.pad(softmax.scaled(best), (0, pad), value=-torch.inf)
    index = torch.nn.functional.pad(index + first, (0, pad))
    best, order = _gathered(best, softmax.group).topk(k)
    return _gathered(index, softmax.group).gather(1, order).int(), best - log_z[:, None]


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, k] of each rank -> [N, k * ranks], in the order of the ranks."""
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
