"""Logprobs under the weights before an update: kept from a separate pass, and compared with the engines'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.passes.metrics import LOGPROB_DIFFERENCE, PassMetrics
from skyrl_train.ranks import LogprobLimit, ParallelRanks
from skyrl_train.types import TrainBatch


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Logprobs of a step's samples, with the step and the weights that they belong to."""

    step_id: int
    policy_version: int
    values: Tensor | None
    """[T] float32; None on a pipeline stage without the output layer."""


def old_logprobs(
    kept: OldLogprobs | None,
    batch: TrainBatch,
    policy_version: int,
    num_optimizer_steps: int,
    prox_logp_method: str = "recompute",
) -> Tensor | None:
    """Return the kept logprobs for an update, [T] float32.

    None means that the update's own forward passes yield them: always on a stage without the output layer, for an
    update of one optimizer step, which computes under the weights before the update anyway, and with "loglinear".

    Raises: RuntimeError if an update of several optimizer steps that needs them finds none of its step and weights. The
        first step changes the weights, so the later ones would be compared with a policy that is not the old one.
    """
    if kept is not None and (kept.step_id, kept.policy_version) == (batch.step_id, policy_version):
        return kept.values
    if num_optimizer_steps == 1 or prox_logp_method == "loglinear":
        return None
    found = f"those of step {kept.step_id} and version {kept.policy_version} are kept" if kept else "none are kept"
    raise RuntimeError(
        f"an update of {num_optimizer_steps} optimizer steps needs the old logprobs of step {batch.step_id} under "
        f"policy version {policy_version}, but {found}. Compute them with keep_old_logprobs(batch) right before "
        "update(batch)"
    )


class LogprobCheck:
    """Decides whether an update is refused, on all ranks alike. Without a limit nothing is compared."""

    def __init__(self, limit: LogprobLimit | None, batch: TrainBatch, ranks: ParallelRanks) -> None:
        self._limit, self._batch, self._ranks = limit, batch, ranks
        self.difference: float | None = None
        """Mean over the compared tokens of all ranks, once it is known; None if there is no such token."""
        self._tokens = None if limit is None else compared_tokens(batch, limit.is_compared)

    @property
    def tokens(self) -> Tensor | None:
        """[T] bool: tokens that a forward pass must compare; None if it need not."""
        return None if self._limit is None or self._limit.of_kept else self._tokens

    def refuses_kept(self, old_logprobs: Tensor | None) -> bool:
        """Whether the kept old logprobs [T] are too far from the engines'. A collective of all ranks."""
        if self._limit is None or not self._limit.of_kept:
            return False
        assert self._tokens is not None
        if not self._ranks.reports:
            return self._refuses(0.0, 0.0)
        if old_logprobs is None:  # other samples were kept: there is nothing to compare with
            return self._refuses(float("nan"), 1.0)
        difference = (old_logprobs - self._batch.signals["rollout_logprobs"])[self._tokens].abs()
        return self._refuses(float(difference.sum(dtype=torch.float64)), float(len(difference)))

    def refuses_pass(self, metrics: PassMetrics) -> bool:
        """Whether the logprobs of a forward pass are too far from the engines'. A collective of all ranks."""
        if self.tokens is None:
            return False
        # The sums are over all data-parallel ranks already, so one rank contributes them.
        if self._ranks.reports and self._ranks.dp_rank == 0:
            return self._refuses(*metrics.totals[LOGPROB_DIFFERENCE].sums)
        return self._refuses(0.0, 0.0)

    def _refuses(self, total: float, count: float) -> bool:
        assert self._limit is not None
        sums = torch.tensor([total, count], dtype=torch.float64, device=device())
        dist.all_reduce(sums)
        total, count = sums.tolist()
        if count == 0:
            return False
        self.difference = total / count
        return not self.difference <= self._limit.nats  # a NaN is refused


def compared_tokens(batch: TrainBatch, is_compared: Tensor) -> Tensor:
    """[T] bool: tokens that the policy wrote, of the compared samples."""
    chosen = is_compared[batch.sample_ids]
    return batch.loss_mask & torch.repeat_interleave(chosen, batch.cu_seqlens.diff().long())
