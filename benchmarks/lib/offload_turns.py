"""How fast a policy with its optimizer leaves its GPUs and comes back, beside copies of pinned memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.lib.memory_watch import OutsideTorch
from benchmarks.lib.policy_job import GIB
from skyrl_train.ranks import Rendezvous

if TYPE_CHECKING:
    from benchmarks.lib.update_ranks import Job


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank found."""

    num_bytes: int
    """That are copied out in a turn, and back."""
    first_s: float
    """The first offload, in which host memory is pinned."""
    out_s: list[float]
    back_s: list[float]
    pinned: tuple[float, float]
    """Bytes per second of pinned copies, out and back."""
    outside_bytes: int
    """Of the device when all is offloaded, outside torch: the CUDA context, NCCL; 0 without a GPU."""
    reserved_bytes: int
    """The same within torch."""


def turns(rendezvous: Rendezvous, given: tuple[Job, int]) -> Rank:
    """One rank of `--gpus`."""
    import torch.distributed as dist

    from benchmarks.lib.copies import come_back, pinned_copies, timed
    from benchmarks.lib.update_ranks import build
    from skyrl_train.device import device_type
    from skyrl_train.device.memory import memory_in_use

    job, num_turns = given
    outside = OutsideTorch(rendezvous.rank)
    policy, batch = build(rendezvous, job)
    policy.update(batch)

    def together(work: Callable[[], object]) -> float:
        dist.barrier()
        return timed(work)

    moved = []
    first_s = together(policy.offload)
    left = (outside(), int(memory_in_use()["reserved"])) if device_type() == "cuda" else (0, 0)
    come_back(policy)
    out_s, back_s = [], []
    for _ in range(num_turns):
        out_s.append(together(lambda: moved.append(policy.offload())))
        back_s.append(together(lambda: come_back(policy)))
    policy.offload()
    dist.barrier()
    return Rank(moved[0].num_bytes, first_s, out_s, back_s, pinned_copies(), *left)


def summary(ranks: Sequence[Rank]) -> dict[str, float]:
    """Of each turn the slowest rank; of the turns the median; of the bus what the same bytes would take it."""
    out_s, back_s = (
        statistics.median(max(one) for one in zip(*times, strict=True))
        for times in ([rank.out_s for rank in ranks], [rank.back_s for rank in ranks])
    )
    pinned_out_s, pinned_back_s = (max(rank.num_bytes / rank.pinned[way] for rank in ranks) for way in range(2))
    most = max(rank.num_bytes for rank in ranks)
    return {
        "GB of a rank": most / 1e9,
        "first offload s": max(rank.first_s for rank in ranks),
        "out s": out_s,
        "back s": back_s,
        "out GB/s": most / out_s / 1e9,
        "back GB/s": most / back_s / 1e9,
        "pinned copies out GB/s": most / pinned_out_s / 1e9,
        "pinned copies back GB/s": most / pinned_back_s / 1e9,
        "share of pinned copies": (pinned_out_s + pinned_back_s) / (out_s + back_s),
        "left by torch GiB": max(rank.reserved_bytes for rank in ranks) / GIB,
        "left outside torch GiB": max(rank.outside_bytes for rank in ranks) / GIB,
    }
