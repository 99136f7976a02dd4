"""How fast a policy with its optimizer leaves its GPUs and comes back, beside copies of pinned memory.

    python benchmarks/offload.py --shape qwen3-4b
    python benchmarks/offload.py --shape qwen3-8b --gpus 2 --pp 2

All ranks do the same at once: one update, so that the optimizer has its state; a first turn, which pins host memory;
--turns of offload and reload; and copies of 1 GiB between pinned memory and the device, best of three each way.
Gradients go and come as memory that is given back and zeroed, without a copy. Of each turn the slowest rank counts.
Without a GPU nothing is pinned: only good for trying the command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_step import GIB, make_model, title, update_job, update_parser
from memory_watch import OutsideTorch
from rich.console import Console
from rich.table import Table

from skyrl_train.ranks import Rendezvous

if TYPE_CHECKING:
    from update_ranks import Job

    from skyrl_train.megatron.policy import MegatronPolicy


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = update_parser(__doc__)
    parser.set_defaults(samples=16, sample_tokens=128)
    parser.add_argument("--turns", type=int, default=4, help="measured ones, after the first")
    return parser.parse_args(given)


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


def timed(work: Callable[[], object]) -> float:
    """Seconds, with what the device was asked."""
    from skyrl_train.device import synchronize

    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def pinned_copies() -> tuple[float, float]:
    """Bytes per second between the device and pinned host memory, out and back, each the best of three."""
    import torch

    from skyrl_train.device import device, device_type

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=device_type() == "cuda")
    there = torch.empty(GIB, dtype=torch.uint8, device=device())
    out_s = min(timed(lambda: host.copy_(there, non_blocking=True)) for _ in range(3))
    back_s = min(timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(3))
    return GIB / out_s, GIB / back_s


def come_back(policy: MegatronPolicy) -> None:
    """With the optimizer, whose copies `reload` leaves under way."""
    policy.reload()
    policy._memory.settle()


def turns(rendezvous: Rendezvous, given: tuple[Job, int]) -> Rank:
    """One rank of `--gpus`."""
    import torch.distributed as dist
    from update_ranks import build

    from skyrl_train.device import device_type, memory_in_use

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


def main() -> int:
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    args, console = arguments(), Console(width=120, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        make_model(folder, args)
        ranks = run_on_ranks(turns, (update_job(folder, args), args.turns), args.gpus, timeout_s=1800)
    found = summary(ranks)
    table = Table("", "", title=title(args, "offload and reload"))
    for name, value in found.items():
        table.add_row(name, f"{value:.1%}" if name.startswith("share") else f"{value:.4g}")
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found | {"ranks": [asdict(rank) for rank in ranks]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
