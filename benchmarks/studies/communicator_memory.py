"""Device memory of NCCL communicators: the context first, then each further communicator of all ranks and of one.

    python -m benchmarks.studies.communicator_memory [--gpus 2] [--communicators 3]
    python -m benchmarks.studies.communicator_memory --gpus 2 --max-ctas 8
    NCCL_BUFFSIZE=1048576 python -m benchmarks.studies.communicator_memory --gpus 2

With several ranks each communicator of all reduces first, then sends from a rank to the next, as pipelines do, 64 MiB
each time; of three more times the fastest is told.
--max-ctas limits the blocks of a communicator's kernels and with them its channels, each of which has buffers. In
processes that do nothing else, read as used minus torch's reserved memory (lib/memory_watch.py). Without a GPU the ranks
are joined by gloo and the numbers are those of resident memory: only good for trying the command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.memory_watch import OutsideTorch
from benchmarks.lib.copies import timed
from rich.console import Console
from rich.table import Table

from skyrl_train.ranks import Rendezvous
from skyrl_train.stores import join_store

GIB = 2**30
SENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """What a rank found after one more thing was done."""

    name: str
    outside_bytes: int
    """Of its device, outside torch's allocator."""
    gb_per_s: float | None = None
    """Of what was done, into the rank."""


def live(rendezvous: Rendezvous, given: tuple[int, int | None]) -> list[Stage]:
    """One rank's life."""
    import torch
    import torch.distributed as dist

    from skyrl_train.device import device, device_type
    from skyrl_train.megatron.model.parallel import few_channels

    communicators, max_ctas = given
    rank, world_size = rendezvous.rank, rendezvous.world_size
    outside = OutsideTorch(rank)
    sent, received = (torch.ones(SENT_BYTES // 4, device=device()) for _ in range(2))
    stages = [Stage("context", outside())]
    dist.init_process_group(
        "nccl" if device_type() == "cuda" else "gloo",
        store=join_store(rendezvous),
        rank=rank,
        world_size=world_size,
    )

    def send(group: Any) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world_size, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def new_group(ranks: list[int]) -> Any:
        return dist.new_group(ranks, pg_options=None if max_ctas is None else few_channels(max_ctas, None))

    def after(name: str, work: Callable[[], object], share: float) -> None:
        work()
        used, seconds = outside(), min(timed(work) for _ in range(3))
        speed = share * SENT_BYTES / seconds / 1e9 if share else None
        stages.append(Stage(name, used, speed))

    for number in range(communicators):
        group, name = new_group(list(range(world_size))), f"communicator {number + 1} of all ranks"
        # In a ring each rank receives this share of a tensor that is reduced.
        after(f"{name} reduces", partial(dist.all_reduce, sent, group=group), 2 * (world_size - 1) / world_size)
        if world_size > 1:
            after(f"{name} sends", partial(send, group), 1.0)
    for number in range(communicators):
        alone = [new_group([one]) for one in range(world_size)]
        after(f"communicator {number + 1} of one rank", partial(dist.all_reduce, sent, group=alone[rank]), 0.0)
    dist.destroy_process_group()
    return stages


def main() -> int:
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on a GPU of its own")
    parser.add_argument("--communicators", type=int, default=3)
    parser.add_argument("--max-ctas", type=int, help="of a communicator (default: NCCL's choice)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    first, *_ = run_on_ranks(live, (args.communicators, args.max_ctas), args.gpus, timeout_s=300)
    table = Table(
        "after",
        "outside torch GiB",
        "more GiB",
        "GB/s into a rank",
        title=f"communicators of {args.gpus} rank(s)",
    )
    before = 0
    for stage in first:
        speed = "" if stage.gb_per_s is None else f"{stage.gb_per_s:.0f}"
        more = (stage.outside_bytes - before) / GIB
        table.add_row(stage.name, f"{stage.outside_bytes / GIB:.2f}", f"{more:+.2f}", speed)
        before = stage.outside_bytes
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(stage) for stage in first], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
