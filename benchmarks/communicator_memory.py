"""What NCCL communicators take of a device: the context first, then each further communicator of all ranks and of one.

    python benchmarks/communicator_memory.py [--gpus 2] [--communicators 3]
    python benchmarks/communicator_memory.py --gpus 2 --max-ctas 4
    NCCL_BUFFSIZE=1048576 python benchmarks/communicator_memory.py --gpus 2

With several ranks each communicator of all reduces first, then sends from a rank to the next, as pipelines do.
--max-ctas limits the blocks of a communicator's kernels and with them its channels, each of which has buffers. In
processes that do nothing else, read as used minus torch's reserved memory (memory_watch.py). Without a GPU the ranks
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


def live(rendezvous: Rendezvous, given: tuple[int, int | None]) -> list[tuple[str, int]]:
    """One rank's (stage, bytes outside torch's allocator after it)."""
    import torch
    import torch.distributed as dist

    from skyrl_train.device import device, device_type

    communicators, max_ctas = given
    outside = OutsideTorch(rendezvous.rank)
    one = torch.ones(1, device=device())
    stages = [("context", outside())]
    dist.init_process_group(
        "nccl" if device_type() == "cuda" else "gloo",
        init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
    )
    options = None
    if max_ctas is not None and device_type() == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
    following, previous = ((rendezvous.rank + step) % rendezvous.world_size for step in (1, -1))
    for number in range(communicators):
        group = dist.new_group(pg_options=options)
        dist.all_reduce(one, group=group)
        stages.append((f"communicator {number + 1} of all ranks reduces", outside()))
        if rendezvous.world_size > 1:
            moves = [dist.P2POp(dist.isend, one, following, group), dist.P2POp(dist.irecv, one + 1, previous, group)]
            for work in dist.batch_isend_irecv(moves):
                work.wait()
            stages.append((f"communicator {number + 1} of all ranks sends", outside()))
    for number in range(communicators):
        alone = [dist.new_group([rank], pg_options=options) for rank in range(rendezvous.world_size)]
        dist.all_reduce(one, group=alone[rendezvous.rank])
        stages.append((f"communicator {number + 1} of one rank", outside()))
    dist.destroy_process_group()
    return stages


def main() -> int:
    from skyrl_train.megatron.local_ranks import run_on_ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on a GPU of its own")
    parser.add_argument("--communicators", type=int, default=3)
    parser.add_argument("--max-ctas", type=int, help="of a communicator (default: NCCL's choice)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    first, *_ = run_on_ranks(live, (args.communicators, args.max_ctas), args.gpus, timeout_s=300)
    table = Table("after", "outside torch GiB", "more GiB", title=f"communicators of {args.gpus} rank(s)")
    for (_, before), (name, now) in pairwise([("", 0), *first]):
        table.add_row(name, f"{now / GIB:.2f}", f"{(now - before) / GIB:+.2f}")
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(dict(first), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
