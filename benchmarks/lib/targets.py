"""The rows of benchmarks/table.py: what is measured by which command, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]
"""What a command wrote to its --json file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One number of a row."""

    what: str
    before: str
    """Earlier measurement."""
    target: float
    value: Callable[[Result], float | None]
    unit: str = "s"
    """s, %, x (a factor) or ms."""
    is_least: bool = False
    """Whether the target is the least that is wanted, not the most."""

    def is_met(self, value: float) -> bool:
        return value >= self.target if self.is_least else value <= self.target

    @property
    def target_text(self) -> str:
        return f"at {'least' if self.is_least else 'most'} {self.shown(self.target)}"

    def shown(self, value: float) -> str:
        if self.unit == "%":
            return f"{value:.1%}"
        digits = 3 if abs(value) < 10 else 4
        return f"{value:.{digits}g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """One command."""

    name: str
    command: str
    """Of this package; --json and --model are added."""
    readings: tuple[Reading, ...]
    gpus: int = 1
    model: str | None = None
    """Folder of the checkpoint, shared by all rows with the same name."""
    after: str | None = None
    """Row that has to end before."""
    alone: bool = False
    """Whether nothing else may run on the host: its time is largely that of Python."""
    timeout_s: float = 900.0
    profile: Callable[[Result], Mapping[str, float]] | None = None
    """Where the time of a miss goes."""
    profile_unit: str = "s"


def at(*path: str) -> Callable[[Result], float | None]:
    """The number under these keys; None where there is none."""

    def value(result: Result) -> float | None:
        found: Any = result
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    return value


def ratio(above: Callable[[Result], float | None], below: Callable[[Result], float | None]) -> Any:
    def value(result: Result) -> float | None:
        upper, lower = above(result), below(result)
        return None if upper is None or not lower else upper / lower

    return value


def beyond_transfer(result: Result) -> float | None:
    """Milliseconds that engines pause in a sync of the streaming run beyond the transfer."""
    seconds = at("fixed_staleness_1", "perf/sync_overhead_s")(result)
    return None if seconds is None else 1000 * seconds


def difference(result: Result) -> float:
    """The largest relative difference of what torch allocates after the start and at the peak."""
    bound = ("weights, gradients, optimizer", "peak of an update")
    pairs = [(row["forecast"], row["measured"]) for row in result["rows"] if row["name"] in bound]
    return max(abs(forecast / measured - 1) for forecast, measured in pairs)


def kernels(result: Result) -> Mapping[str, float]:
    """Fractions of the kernels' time by kind, those above 1 %."""
    return {name: share for name, share in result["kernel_shares"].items() if share > 0.01}


def mfu(what: str, before: str, target: float) -> tuple[Reading, ...]:
    return (Reading(f"{what}, MFU of an update", before, target, at("mfu"), "%", is_least=True),)


def plan(name: str, what: str, options: str, model: str, gpus: int = 1) -> Row:
    reading = Reading(f"memory forecast of {what}, largest difference", "", 0.1, difference, "%")
    return Row(f"plan-{name}", f"benchmarks.memory plan {options}", (reading,), gpus, model)


COLOCATED = "benchmarks.step --colocate"
UPDATE = "benchmarks.step --update-only --trace kernels.txt"
ROWS = (
    Row(
        "streaming",
        "benchmarks.streaming --shape qwen3-0.6b --cases fixed --steps 6 generator.kv_cache_memory_gb=60",
        (
            Reading(
                "Qwen3-0.6B, 64 x 8 x 512 tokens, 1 + 1 GPUs, a streaming step",
                "9.67 s (synchronous)",
                7.0,
                at("fixed_staleness_1", "step_s"),
            ),
            Reading("the same, engines idle", "", 0.05, at("fixed_staleness_1", "async/engine_idle_share"), "%"),
            Reading("the same, pause of the engines beyond the transfer", "45 to 71 ms", 50.0, beyond_transfer, "ms"),
        ),
        gpus=2,
        model="0.6b",
        alone=True,
    ),
    Row(
        "step-4b",
        f"{COLOCATED} --shape qwen3-4b --prompts 32 --new-tokens 2048 --engine-alone --warm-up 1 --steps 1",
        (
            Reading("Qwen3-4B, colocated, 256 samples x 2,048 tokens, a step", "67.4 s", 60.0, at("step_s")),
            Reading(
                "the same, generated tokens/s over vLLM alone",
                "",
                0.9,
                ratio(at("generated_tokens_per_s"), at("vllm_alone_tokens_per_s")),
                "%",
                is_least=True,
            ),
        ),
        model="4b",
        profile=lambda result: result["phases_s"],
        alone=True,
    ),
    Row(
        "step-0.6b",
        f"{COLOCATED} --shape qwen3-0.6b",
        (Reading("Qwen3-0.6B, colocated, 64 x 8 x 512 tokens, a step, no override", "17.05 s", 9.5, at("step_s")),),
        model="0.6b",
        profile=lambda result: result["phases_s"],
        alone=True,
    ),
    Row(
        "cp2",
        f"{UPDATE} --shape qwen3-4b --gpus 2 --cp 2 --steps 2 --warm-up 1 --samples 4 --sample-tokens 32768",
        mfu("Qwen3-4B, samples of 32,768 tokens, CP2", "26.8 %", 0.40),
        gpus=2,
        model="4b",
        profile=kernels,
        profile_unit="fraction of the kernels' time",
    ),
    Row(
        "ep2",
        f"{UPDATE} --shape qwen3-30b-a3b --layers 6 --gpus 2 --ep 2 --samples 128",
        mfu("Qwen3-30B-A3B, 6 layers, EP2", "", 0.35),
        gpus=2,
        model="30b-6",
        profile=kernels,
        profile_unit="fraction of the kernels' time",
    ),
    Row(
        "tp2",
        f"{UPDATE} --shape qwen3-4b --gpus 2 --tp 2",
        mfu("Qwen3-4B, TP2", "36 to 40 %", 0.45),
        gpus=2,
        model="4b",
        profile=kernels,
        profile_unit="fraction of the kernels' time",
    ),
    Row(
        "experts",
        f"{UPDATE} --shape qwen3-30b-a3b --layers 6",
        mfu("Qwen3-30B-A3B, 6 layers, one GPU", "31.4 %", 0.40),
        model="30b-6",
        profile=kernels,
        profile_unit="fraction of the kernels' time",
    ),
    Row(
        "sync-8b",
        "benchmarks.sync --shape qwen3-8b",
        (
            Reading("Qwen3-8B, 1 + 1 GPUs, a weight sync", "0.12 s", 0.07, at("later", "whole")),
            Reading("the same, over one broadcast of the bytes", "2.7 x", 1.5, at("whole_over_limit"), "x"),
            Reading("the same, the first sync", "0.96 s", 0.3, at("first_s")),
        ),
        gpus=2,
        model="8b",
        profile=lambda result: result["later"],
    ),
    plan("8b", "Qwen3-8B, 18 layers", "--shape qwen3-8b --layers 18", "8b-18"),
    plan("30b-a3b", "Qwen3-30B-A3B, 6 layers", "--shape qwen3-30b-a3b --layers 6", "30b-6"),
    plan("4b", "Qwen3-4B", "--shape qwen3-4b", "4b"),
    plan("4b-pp2", "Qwen3-4B, PP2", "--shape qwen3-4b --gpus 2 --pp 2", "4b", gpus=2),
    plan("0.6b", "Qwen3-0.6B", "--shape qwen3-0.6b", "0.6b"),
    Row(
        "start",
        f"{COLOCATED} --shape qwen3-0.6b --warm-up 1 --steps 1",
        (Reading("policy and engines up, warm caches, one GPU", "66 to 127 s", 45.0, at("ready_s")),),
        model="0.6b",
        after="step-0.6b",
        alone=True,
    ),
    Row(
        "trl",
        "benchmarks.trl gpu",
        (
            Reading(
                "Qwen3-0.6B, a step of `benchmarks.trl`, TRL's time over ours",
                "1.81 x",
                2.0,
                ratio(at("trl", "step_s"), at("ours", "step_s")),
                "x",
                is_least=True,
            ),
        ),
        model="0.6b",
        profile=lambda result: result["ours"]["phases_s"],
        alone=True,
    ),
)
