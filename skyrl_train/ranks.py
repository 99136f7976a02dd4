"""Plain data about the ranks of a worker group, without Megatron, so that the driver can hold it. Imports no torch."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.types import Metrics

LOOPBACK = "127.0.0.1"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Parts of a policy on the device that are offloaded separately; the gradients belong to the optimizer."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rendezvous of one process group."""

    rank: int
    world_size: int
    address: str
    """Host of rank 0."""
    port: int
    timeout_s: float
    """Timeout of one collective; a rank whose peers died fails after it."""
    listening: socket.socket | None = None
    """Socket in the process of rank 0 that holds the port until the store serves there; None: nobody holds it."""


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """Position of one rank in the parallel layout."""

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
    """Bound on the engines' error; beyond it the ranks refuse an update before its first optimizer step."""

    nats: float
    """Largest mean |engine - trainer| logprob difference of the compared tokens."""
    is_compared: Tensor
    """[B] bool, by index in the ExperienceBatch: every token of the sample was sampled from the current weights."""
    of_kept: bool
    """Compare the kept old logprobs; False compares those of the first forward pass, before any weight changes."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One rank's report of an update."""

    metrics: Metrics
    """Metrics of the whole step, by the names of docs/tracking.md; only on the last pipeline stage."""
    seconds: float = 0.0
    busy_seconds: float = 0.0
    """Seconds this rank spent computing inside Megatron's schedules."""
    schedule_seconds: float = 0.0
    """Seconds inside Megatron's schedules."""
    train_flops: float = 0.0
    """Floating-point operations of the model in this rank's data-parallel shard, forward and backward."""
    peak_flops: float | None = None
    """Peak FLOP/s of the rank's device; None if unknown."""
    logprob_difference: float | None = None
    """Mean |engine - trainer| of the compared tokens of all ranks; None without a LogprobLimit or compared tokens."""
    is_refused: bool = False
    """Whether the difference exceeded the limit (or was NaN), so that nothing was changed."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state from which the ranks of a trained model start instead of from the initial model."""

    folder: str
    """Folder with one file per rank."""
    num_steps: int
    """Optimizer steps in the weights."""
    critic: SavedState | None = None
    """In the state of a policy: that of its critic."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank copied between device and host, or to disk."""

    num_bytes: int
    seconds: float
    """Seconds, allocating and freeing included."""


def pad_multiple(tp_size: int, cp_size: int) -> int:
    """Number of tokens that the length of each sample is padded to a multiple of.

    Sequence parallelism splits a sample into tp_size equal parts, context parallelism into 2 * cp_size chunks.
    """
    return tp_size * (2 * cp_size if cp_size > 1 else 1)


def free_port() -> int:
    """Return a port of this machine that is free now, for a process that listens soon.

    Others may take it before; where this program listens itself, `stores.listen` holds it. Not one chosen by the
    system: those are ports of outgoing connections (from 32768 on). Ray's workers use 10002 to 19999.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError("none of 100 ports between 20000 and 32000 is free on this machine")
