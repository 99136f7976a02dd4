"""What NCCL communicators take of a device: the context first, then each further communicator of all ranks and of one.

    python benchmarks/communicator_memory.py [--gpus 2] [--communicators 3]

In processes that do nothing else, read as used minus torch's reserved memory (memory_watch.py). Without a GPU the ranks
are joined by gloo and the numbers are those of resident memory: only good for trying the command.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

from memory_watch import OutsideTorch
from rich.console import Console
from rich.table import Table

from skyrl_train.ranks import Rendezvous

GIB = 2**30


def live(rendezvous: Rendezvous, communicators: int) -> list[tuple[str, int]]:
    """One rank's (stage, bytes outside torch's allocator after it)."""
    import torch
    import torch.distributed as dist

    from skyrl_train.device import device, device_type

    outside = OutsideTorch(rendezvous.rank)
    one = torch.ones(1, device=device())
    stages = [("context", outside())]
    dist.init_process_group(
        "nccl" if device_type() == "cuda" else "gloo",
        init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
    )
    for number in range(communicators):
        group = dist.new_group()
        dist.all_reduce(one, group=group)
        stages.append((f"communicator {number + 1} of all ranks", outside()))
    for number in range(communicators):
        alone = [dist.new_group([rank]) for rank in range(rendezvous.world_size)]
        dist.all_reduce(one, group=alone[rendezvous.rank])
        stages.append((f"communicator {number + 1} of one rank", outside()))
    dist.destroy_process_group()
    return stages


def main() -> int:
    from skyrl_train.megatron.local_ranks import run_on_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on a GPU of its own")
    parser.add_argument("--communicators", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    first, *_ = run_on_ranks(live, args.communicators, args.gpus, timeout_s=300)
    table = Table("after", "outside torch GiB", "more GiB", title=f"communicators of {args.gpus} rank(s)")
    for (_, before), (name, now) in pairwise([("", 0), *first]):
        table.add_row(name, f"{now / GIB:.2f}", f"{(now - before) / GIB:+.2f}")
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(dict(first), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
