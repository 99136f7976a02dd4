"""What a policy takes of its device outside torch's allocator, after each stage of its life."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.lib.memory_watch import Growth, OutsideTorch, Watch
from benchmarks.lib.policy_job import GIB
from skyrl_train.ranks import OPTIMIZER, Rendezvous

MIB = 2**20


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

    from benchmarks.lib.update_ranks import build
    from skyrl_train.device.memory import empty_cache, memory_in_use
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
        policy.prompt_logprobs(batch)
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
