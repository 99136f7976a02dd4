"""Ranks of a worker group: where they meet, and which place of the parallel layout each one has.

Plain data without Megatron, so that the driver can hold it.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

from torch import Tensor

from skyrl_train.types import Metrics

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""What the policy's ranks hold on their devices, and give back one by one; the gradients go with the optimizer."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one worker group meet."""

    rank: int
    world_size: int
    address: str
    """Host of rank 0."""
    port: int
    timeout_s: float
    """Longest wait of one collective; a rank that lost its peers fails after it."""


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """Place of one rank in the layout."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    dp_size: int
    is_last_stage: bool

    @property
    def reports(self) -> bool:
        """True on the one rank of each data-parallel shard that returns its logprobs to the driver."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def owns_stage(self) -> bool:
        """True on the one rank of each pipeline stage that sends or saves what the stage exports."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.dp_rank == 0


@dataclass(frozen=True, slots=True)
class LogprobLimit:
    """Bound on the engines' error, beyond which the ranks refuse an update before its first optimizer step."""

    nats: float
    """Largest mean |engine - trainer| logprob difference of the compared tokens."""
    is_compared: Tensor
    """[B] bool, by index in the ExperienceBatch: every token of the sample was sampled from the current weights."""
    of_kept: bool
    """Compare the kept old logprobs; False compares those of the first forward pass, before any weight changes."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One rank's account of an update."""

    metrics: Metrics
    """Under the names of docs/tracking.md, over the whole step; empty but on the last pipeline stage."""
    seconds: float
    busy_seconds: float
    """Seconds this rank spent computing inside Megatron's schedules."""
    schedule_seconds: float
    """Seconds inside Megatron's schedules."""
    train_flops: float
    """Floating-point operations of the model in this rank's data-parallel shard, forward and backward."""
    peak_flops: float | None
    """FLOP/s that the rank's device can do at most; None where it is not known."""
    logprob_difference: float | None = None
    """Mean |engine - trainer| of the compared tokens of all ranks; None without a LogprobLimit or compared tokens."""
    is_refused: bool = False
    """The difference is beyond the limit (or not a number), and nothing was changed."""


def refused(difference: float | None) -> UpdateReport:
    """The account of an update that was not made."""
    return UpdateReport(
        metrics={},
        seconds=0.0,
        busy_seconds=0.0,
        schedule_seconds=0.0,
        train_flops=0.0,
        peak_flops=None,
        logprob_difference=difference,
        is_refused=True,
    )


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the ranks of a policy go on with instead of the model as it came."""

    folder: str
    """With a file of each rank."""
    policy_version: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank copied between device and host."""

    num_bytes: int
    seconds: float
    """With allocating and freeing."""


def pad_multiple(tp_size: int, cp_size: int) -> int:
    """Samples are padded to a multiple of this many tokens.

    Sequence parallelism cuts a sample into tp_size equal parts, context parallelism into 2 * cp_size chunks.
    """
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def free_port() -> int:
    """A port of this machine that was free a moment ago, for a Rendezvous.

    Not one that the system picks: it picks among the ports of outgoing connections (from 32768 on), one of which may
    take it before rank 0 listens (EADDRINUSE, seen in the tests). Ray's workers use 10002 to 19999.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError("none of 100 ports between 20000 and 32000 is free on this machine")
