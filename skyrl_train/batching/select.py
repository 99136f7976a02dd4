"""Selections of tokens by statistics of each whole mini-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.selection import MiniBatch, selected
from skyrl_train.batching.split import mini_batch_bounds
from skyrl_train.types import TokenBatch


def selections_of(
    objective: Objective,
    batch: TokenBatch,
    advantages: Tensor,
    signals: Mapping[str, Tensor],
    num_mini_batches: int = 1,
) -> dict[str, Tensor]:
    """Signal of `TokenInputs` -> [T] bool, the tokens that the objective's functions select; {} if none does.

    Args: signals: name -> [T], those in `objective.selection_needs`.
    """
    parts = []
    for start, end in mini_batch_bounds(batch.group_ids, num_mini_batches) if objective.selections else ():
        bounds = batch.cu_seqlens[start : end + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        mini_batch = MiniBatch(
            token_ids=batch.token_ids[tokens],
            cu_seqlens=bounds - bounds[0],
            loss_mask=batch.loss_mask[tokens],
            advantages=advantages[tokens],
            signals={name: values[tokens] for name, values in signals.items()},
        )
        parts.append(selected(objective.selections, mini_batch))
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
