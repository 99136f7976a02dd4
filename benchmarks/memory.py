"""What a policy takes of its device, and how fast it leaves it.

    python -m benchmarks.memory stages --shape qwen3-0.6b [--gpus 2 --pp 2] [--operations]
    python -m benchmarks.memory plan --shape qwen3-4b [--layers 18] [--gpus 2 --tp 2]
    python -m benchmarks.memory offload --shape qwen3-4b [--turns 4]
    python -m benchmarks.memory logprobs [--tokens 131072] [--vocabulary 151936] [--hidden 2560]

`stages`: memory outside torch's allocator after each stage of a policy's life: the CUDA context, NCCL's buffers, cuBLAS
and other libraries, loaded kernels. That, and what torch keeps, is what an offloaded trainer leaves behind. Read as
used minus torch's reserved memory; nobody else may use the devices meanwhile. --operations names the operations during
which it grows (rank 0; slow).

`plan`: what the forecast (skyrl_train/forecast/) says of a policy's memory beside what it takes; exits with 1 if what
torch allocates differs by more than 10 %.

`offload`: all ranks do the same at once: one update, so that the optimizer has its state; a first turn, which pins
host memory; --turns of offload and reload; and copies of 1 GiB between pinned memory and the device, best of three
each way. Gradients go and come as memory that is given back and zeroed, without a copy. Of each turn the slowest rank
counts.

`logprobs`: memory and time of the output layer with logprobs and entropy of one micro-batch, logits kept and computed
again (lib/head_memory.py); needs a GPU. Exits with 1 if the second takes more than 2 GiB.

Without a GPU the other numbers are those of resident memory, and nothing is pinned: only good for trying the command.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib import memory_stages, offload_turns
from benchmarks.lib.policy_job import add_batch, add_model, make_model, title, update_job
from benchmarks.lib.results import write_json
from skyrl_train.device import device_type

MOST_GIB = 2.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    stages, offload = commands.add_parser("stages"), commands.add_parser("offload")
    logprobs, plan = commands.add_parser("logprobs"), commands.add_parser("plan")
    for command in (stages, offload, plan):
        add_model(command)
        add_batch(command)
    stages.add_argument("--operations", action="store_true", help="name the operations at which it grows")
    stages.add_argument("--least-mib", type=int, default=4, help="smallest growth that --operations names")
    offload.set_defaults(samples=16, sample_tokens=128)
    offload.add_argument("--turns", type=int, default=4, help="measured ones, after the first")
    logprobs.add_argument("--tokens", type=int, default=131_072)
    logprobs.add_argument("--vocabulary", type=int, default=151_936)
    logprobs.add_argument("--hidden", type=int, default=2560, help="size of a hidden state")
    logprobs.add_argument("--json", type=Path, help="write the result to this file")
    return parser.parse_args()


def measure_stages(folder: Path, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    given = update_job(folder, args), args.least_mib * memory_stages.MIB if args.operations else None
    lives = run_on_ranks(memory_stages.live, given, args.gpus, timeout_s=1800)
    ranks, growths = [stages for stages, _ in lives], lives[0][1]
    memory_stages.show(ranks, growths, title(args, "memory outside torch's allocator"), console)
    return {"ranks": [[asdict(stage) for stage in stages] for stages in ranks], "growths": [*map(asdict, growths)]}


def measure_offload(folder: Path, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    ranks = run_on_ranks(offload_turns.turns, (update_job(folder, args), args.turns), args.gpus, timeout_s=1800)
    found = offload_turns.summary(ranks)
    table = Table("", "", title=title(args, "offload and reload"))
    for name, value in found.items():
        table.add_row(name, f"{value:.1%}" if name.startswith("share") else f"{value:.4g}")
    console.print(table)
    return found | {"ranks": [asdict(rank) for rank in ranks]}


def measure_plan(folder: Path, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from benchmarks.lib.forecast_check import compare, measure
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    ranks = run_on_ranks(measure, update_job(folder, args), args.gpus, timeout_s=1800)
    return compare(ranks, args, console) | {"ranks": [asdict(rank) for rank in ranks]}


def measure_logprobs(args: argparse.Namespace, console: Console) -> int:
    if device_type() == "cpu":
        print("error: this command reads a GPU's memory, and there is none here", file=sys.stderr)
        return 2
    from benchmarks.lib.head_memory import HeadJob, measure
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    table = Table(
        "entropy",
        "",
        "GiB beside hidden states and weight",
        "forward ms",
        "backward ms",
        title=f"logprobs of {args.tokens:,} tokens, vocabulary {args.vocabulary:,}, hidden states of {args.hidden:,}",
    )
    rows = []
    for with_entropy in (False, True):
        job = HeadJob(args.tokens, args.vocabulary, args.hidden, with_entropy)
        for use in run_on_ranks(measure, job, 1, timeout_s=600)[0]:
            rows.append({"with_entropy": with_entropy} | asdict(use))
            numbers = f"{use.extra_gib:.2f}", f"{use.forward_ms:.1f}", f"{use.backward_ms:.1f}"
            table.add_row(str(with_entropy), use.way, *numbers)
    console.print(table)
    write_json(args.json, {"tokens": args.tokens, "vocabulary": args.vocabulary, "hidden": args.hidden, "rows": rows})
    return int(any(row["extra_gib"] > MOST_GIB for row in rows if row["way"] != "logits kept"))


def main() -> int:
    args, console = arguments(), Console(width=160, highlight=False, markup=False)
    if args.command == "logprobs":
        return measure_logprobs(args, console)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        make_model(folder, args)
        measures = {"stages": measure_stages, "offload": measure_offload, "plan": measure_plan}
        result = measures[args.command](folder, args, console)
    write_json(args.json, result)
    return int(not result.get("within", True))


if __name__ == "__main__":
    sys.exit(main())
