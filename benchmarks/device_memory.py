"""What a policy takes of its device outside torch's allocator, after each stage of its life.

    python benchmarks/device_memory.py --shape qwen3-0.6b
    python benchmarks/device_memory.py --shape qwen3-0.6b --gpus 2 --pp 2
    python benchmarks/device_memory.py --shape qwen3-0.6b --samples 8 --operations

That is the CUDA context, NCCL's buffers, cuBLAS and other libraries, loaded kernels: what an offloaded trainer leaves
behind, with what torch keeps. Read as used minus torch's reserved memory; nobody else may use the devices meanwhile.
--operations names the operations during which it grows (rank 0; slow). Without a GPU the numbers are those of resident
memory, which has no outside: only good for trying the command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_step import GIB, make_model, title, update_job, update_parser
from memory_watch import Growth, OutsideTorch, Watch
from rich.console import Console
from rich.table import Table

from skyrl_train.ranks import OPTIMIZER, Rendezvous

MIB = 2**20


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = update_parser(__doc__)
    parser.add_argument("--operations", action="store_true", help="name the operations at which it grows")
    parser.add_argument("--least-mib", type=int, default=4, help="smallest growth that --operations names")
    return parser.parse_args(given)


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's memory after a stage."""

    name: str
    outside_bytes: int
    reserved_bytes: int
    """By torch, with what tensors hold."""


def live(rendezvous: Rendezvous, given: tuple[Any, int | None]) -> tuple[list[Stage], list[Growth]]:
    """One rank's life; with a number of bytes rank 0 also looks at every operation for growths of so many."""
    import torch
    from update_ranks import build

    from skyrl_train.device import empty_cache, memory_in_use
    from skyrl_train.megatron.policy import MegatronPolicy

    job, least_bytes = given
    outside = OutsideTorch(rendezvous.rank)
    watch = Watch(outside, least_bytes) if least_bytes is not None and rendezvous.rank == 0 else None
    stages: list[Stage] = []

    def after(name: str, following: str) -> None:
        stages.append(Stage(name, outside(), int(memory_in_use()["reserved"])))
        if watch is not None:
            watch.stage = following

    globals_of_policy = MegatronPolicy.__init__.__globals__
    build_model = globals_of_policy["build_model"]

    def joined(*args: Any, **kwargs: Any) -> Any:
        after("join", "build")
        return build_model(*args, **kwargs)

    with watch or nullcontext():
        after("start", "join")
        with patch.dict(globals_of_policy, build_model=joined):
            policy, batch = build(rendezvous, job)
        after("build", "logprobs")
        policy.logprobs(batch)
        after("logprobs", "update")
        policy.update(batch)
        after("update", "second update")
        policy.update(batch)
        after("second update", "optimizer offloaded")
        policy.offload(OPTIMIZER)
        after("optimizer offloaded", "export")
        for _ in policy.export(torch.bfloat16):
            pass
        after("export", "offloaded")
        policy.offload()
        after("offloaded", "cache emptied")
        empty_cache()
        after("cache emptied", "")
    return stages, [] if watch is None else watch.growths


def show(ranks: list[list[Stage]], growths: list[Growth], heading: str, console: Console) -> None:
    table = Table("after", "outside torch GiB", "more than before MiB", "reserved by torch GiB", title=heading)
    before = 0
    for stages in zip(*ranks, strict=True):
        fullest = max(stages, key=lambda stage: stage.outside_bytes)
        reserved = max(stage.reserved_bytes for stage in stages)
        more = (fullest.outside_bytes - before) / MIB
        table.add_row(fullest.name, f"{fullest.outside_bytes / GIB:.2f}", f"{more:+.0f}", f"{reserved / GIB:.2f}")
        before = fullest.outside_bytes
    console.print(table)
    for growth in growths:
        console.print(f"{growth.stage}: {growth.num_bytes / MIB:+.0f} MiB, {growth.operation}: {growth.where}")


def main() -> int:
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    args, console = arguments(), Console(width=160, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        make_model(folder, args)
        given = update_job(folder, args), args.least_mib * MIB if args.operations else None
        lives = run_on_ranks(live, given, args.gpus, timeout_s=1800)
    ranks, growths = [stages for stages, _ in lives], lives[0][1]
    show(ranks, growths, title(args, "memory outside torch's allocator"), console)
    if args.json:
        result = {
            "ranks": [[asdict(stage) for stage in stages] for stages in ranks],
            "growths": [*map(asdict, growths)],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
