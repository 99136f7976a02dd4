"""Metrics of a pass over a mini-batch, and of an update of several passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.algorithms.inputs import TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce, Total, merged, partial_sums
from skyrl_train.types import Metrics

LOGPROB_DIFFERENCE = "logprob_difference"
"""Total of |engine - trainer| over the compared tokens; not logged."""


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """Metrics of a mini-batch, equal on all ranks of the last pipeline stage; empty on the others."""

    totals: dict[str, Total]
    seconds: float
    busy_seconds: float
    """Time that this rank spent computing, of `seconds`."""


class MicroBatchSums:
    """Adds up the metrics of micro-batches on the device, and once over the ranks."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[Reduce, bool]] = {}
        """Name -> (reduction, whether the metric has its own mask)."""
        self._parts: list[list[Tensor]] = []

    def add(self, metrics: Mapping[str, Metric], tokens: TokenInputs) -> None:
        """Add metrics. Raises: ValueError if their names or reductions are not those of the first call."""
        kinds = {name: (metric.reduce, metric.mask is not None) for name, metric in metrics.items()}
        if self._parts and list(kinds.items()) != list(self._kinds.items()):
            differing = ", ".join(sorted(dict(kinds.items() ^ self._kinds.items()))) or "their order"
            raise ValueError(
                f"a loss or correction returned other metrics than for the micro-batch before: {differing}. Return the "
                "same for every micro-batch"
            )
        self._kinds = kinds
        has_samples = any(metric.reduce is Reduce.SAMPLE_MEAN for metric in metrics.values())
        num_tokens = tokens.per_sample.num_tokens if has_samples else tokens.loss_mask
        self._parts.append([partial_sums(metric, tokens.loss_mask, num_tokens) for metric in metrics.values()])

    def totals(self) -> dict[str, Total]:
        """A collective over the data- and context-parallel ranks; empty if nothing was added."""
        if not self._parts:
            return {}
        is_max = [reduce is Reduce.MAX for reduce, _ in self._kinds.values()]
        sizes = [len(part) for part in self._parts[0]]
        whole = torch.stack([torch.cat(parts) for parts in self._parts])
        largest = torch.repeat_interleave(torch.tensor(is_max), torch.tensor(sizes)).to(whole.device)
        total, peak = whole.sum(0), whole.amax(0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(total, group=group)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        numbers = torch.where(largest, peak, total).tolist()
        found = {}
        for (name, (reduce, is_of_some)), size in zip(self._kinds.items(), sizes, strict=True):
            own, numbers = numbers[:size], numbers[size:]
            sums = (*own, 1.0) if reduce is Reduce.STEP_MEAN else tuple(own)
            found[name] = Total(reduce, sums, is_of_some)
        return found


def update_metrics(passes: Sequence[PassMetrics], norms: Sequence[float], lr: float, name: str = "policy") -> Metrics:
    """Metrics of an update from those of its optimizer steps; {} on a rank that has none.

    Losses and gradient norms are means over optimizer steps, everything per token is a mean over all trained tokens.
    The difference to the engine's logprobs is that of the old logprobs, before any update. Entropy is the first
    mini-batch's. Args: name: that of the objective.
    """
    if not passes[0].totals:
        return {}
    metrics = merged([one_pass.totals for one_pass in passes])
    metrics.pop(LOGPROB_DIFFERENCE, None)
    return metrics | {
        f"{name}/grad_norm": sum(norms) / len(norms),
        f"{name}/{name}_lr": lr,
        f"{name}/num_optimizer_steps": float(len(passes)),
        f"{name}/num_skipped_steps": float(sum(not math.isfinite(norm) for norm in norms)),
    }
