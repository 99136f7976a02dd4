"""The forecast of a policy's memory beside what it takes: after its start, at the peak of an update and offloaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.memory_watch import OutsideTorch
from benchmarks.lib.policy_job import GIB, layout, lora_of, title
from skyrl_train.config.policy import Layout
from skyrl_train.forecast import memory
from skyrl_train.forecast.layout import stages
from skyrl_train.forecast.memory import ModelOfRanks, Pass
from skyrl_train.forecast.readings import readings
from skyrl_train.forecast.shapes import model_config
from skyrl_train.ranks import Rendezvous

if TYPE_CHECKING:
    from benchmarks.lib.update_ranks import Job

BOUND = 0.1
"""Largest relative difference of what torch allocates."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one rank."""

    stage: int
    micro_batches: int
    micro_batch_tokens: int
    """Of the largest, on all context-parallel ranks."""
    built: int
    """Allocated by torch before the first update, without Adam's moments."""
    trained: int
    """Allocated after an update."""
    peak: int
    """Most that was allocated in the second update."""
    reserved: int
    """By torch at that time."""
    outside: int
    """Outside torch after the second update."""
    left: int
    """Of the device when all is offloaded."""
    torch_layers: bool


def measure(rendezvous: Rendezvous, job: Job) -> Measured:
    """One rank's life."""
    import torch

    from benchmarks.lib.update_ranks import build
    from skyrl_train.device import synchronize
    from skyrl_train.device.memory import memory_in_use

    outside = OutsideTorch(rendezvous.rank)
    policy, batch = build(rendezvous, job)
    lengths = batch.cu_seqlens.diff().tolist()
    sizes = [sum(lengths[sample] for sample in samples) for samples in batch.mini_batches[0]]
    built = int(memory_in_use()["allocated"])
    policy.update(batch)
    trained = int(memory_in_use()["allocated"])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    policy.update(batch)
    synchronize()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else trained
    reserved, at_update = int(memory_in_use()["reserved"]), outside()
    policy.offload()
    left = outside() + int(memory_in_use()["reserved"])
    stage, is_torch = policy.ranks.pp_rank, policy.model.torch_layers
    return Measured(stage, len(sizes), max(sizes), built, trained, peak, reserved, at_update, left, is_torch)


def compare(ranks: Sequence[Measured], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the table of each stage; all rows in GiB, and whether what torch allocates is within the bound."""
    constants = readings().memory
    implementation = "torch" if ranks[0].torch_layers else "transformer_engine"
    laid = Layout(replace(layout(args)[0], transformer_impl=implementation), args.gpus)
    config, width = model_config(args.shape, args.layers), 4 if args.float32 else 2
    model = ModelOfRanks(config, laid, width, stages(config, laid, lora_of(args)))
    rows, is_within = [], True
    table = Table("stage", "", "forecast GiB", "measured GiB", "difference", title=title(args, "forecast of memory"))
    for rank in sorted({each.stage: each for each in ranks}.values(), key=lambda each: each.stage):
        stage = model.stages[rank.stage]
        parts = memory.update(model, stage, Pass(rank.micro_batch_tokens, rank.micro_batches))
        weights, gradients, optimizer = (part.likely for part in parts[:3])
        trained, peak = weights + gradients + optimizer, sum(part.likely for part in parts)
        pairs: dict[str, tuple[float, float, bool]] = {
            "weights, gradients, optimizer": (trained, rank.trained, True),
            "peak of an update": (peak, rank.peak, True),
            "activations and logits": (peak - trained, rank.peak - rank.trained, False),
            "reserved by torch": (peak + memory.allocator(parts, constants).likely, rank.reserved, False),
            "outside torch": (memory.outside_torch(laid, constants).likely, rank.outside, False),
            "left when offloaded": (constants.offloaded_gib * GIB, rank.left, False),
        }
        for name, (expected, found, is_bound) in pairs.items():
            difference = expected / found - 1 if found else float("nan")
            is_within &= not is_bound or abs(difference) <= BOUND
            numbers = f"{expected / GIB:.2f}", f"{found / GIB:.2f}", f"{difference:+.1%}"
            table.add_row(str(rank.stage), name, *numbers)
            rows.append({"stage": rank.stage, "name": name, "forecast": expected / GIB, "measured": found / GIB})
    console.print(table)
    console.print(f"layers: {implementation}; what torch allocates is {'' if is_within else 'NOT '}within {BOUND:.0%}")
    return {"layers": implementation, "within": is_within, "rows": rows}
