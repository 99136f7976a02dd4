"""A forecast as tables, lines and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from skyrl_train.cluster.demands import demands
from skyrl_train.config import Config
from skyrl_train.config.training import RunConfig
from skyrl_train.device.nvml import gib
from skyrl_train.forecast.choices.choice import Choices
from skyrl_train.forecast.forecast import Forecast, Inputs
from skyrl_train.forecast.parts import ENGINE, GIB, PhaseMemory
from skyrl_train.forecast.proposals import GPUS_PER_NODE, Proposal, gpus_per_node, override_text
from skyrl_train.forecast.sharing import RESIDENT
from skyrl_train.hf.matrices import num_parameters

SHOWN = 5


def introduction(inputs: Inputs, made: Forecast) -> str:
    """The model, the device, the layout and the samples of a step."""
    config, device, work = inputs.config, inputs.device, inputs.workload
    ranks = config.trainer.placement.num_policy_ranks
    lines = {
        "model": f"{num_parameters(inputs.model) / 1e9:.2f} billion parameters, "
        f"{inputs.model.num_hidden_layers} layers",
        "device": f"{device.name}: {device.memory_gib:g} GiB, {device.tflops:g} TFLOP/s, {device.memory_gb_s:g} GB/s",
        "layout": f"{ranks} policy rank(s): {made.layout}; micro-batches of {config.trainer.micro_batch_tokens} tokens",
        "GPUs": gpus_line(config),
        "step": f"{work.samples} samples of {work.prompt_tokens} + {work.response_tokens} tokens",
    }
    return "\n".join(f"{name:<8}{line}" for name, line in lines.items())


def gpus_line(config: RunConfig) -> str:
    """Number of GPUs that the run reserves, and for what."""
    if not isinstance(config, Config):
        return f"{config.trainer.placement.num_policy_ranks} in all"
    asked = [demand for demand in demands(config) if demand.gpus_each]
    texts = [f"{each.count} {each.name}" + f" with {each.gpus_each} each" * (each.gpus_each > 1) for each in asked]
    if reserved := config.generator.eval_num_engines * config.generator.run_engines_locally:
        texts[-1] += f", {reserved} of them for evaluation"
    placement, widest = config.trainer.placement, max(demand.gpus_each for demand in asked)
    if widest > (gpus_per_node(placement) if placement.colocate_all else GPUS_PER_NODE):
        texts[-1] += f"; a node needs {widest}, because an engine does not span nodes"
    total = sum(demand.count * demand.gpus_each for demand in asked)
    if placement.colocate_all:
        return f"{asked[0].count} in all, shared by {', '.join(texts)}"
    return f"{total} in all: {', '.join(texts)}"


def choices_line(choices: Choices) -> str:
    """What was chosen for keys that the configuration leaves open, and why."""
    found = []
    for choice in choices.made:
        values = ", ".join(f"{key.rpartition('.')[2]}={override_text(value)}" for key, value in choice.values)
        found.append(f"{values}, because {choice.reason}")
    return f"chose   for {choices.device}: {'; '.join(found)}"


def memory_table(made: Forecast) -> Table:
    """GiB of every part in every phase, of the fullest rank."""
    names = list(dict.fromkeys(part.name for phase in made.phases for part in phase.parts))
    heads = [
        phase.phase if phase.device in ("all", phase.phase) else f"{phase.phase} ({phase.device})"
        for phase in made.phases
    ]
    grows = sorted({part.name for phase in made.phases for part in phase.parts if part.least is not None})
    caption = f"needed: without what only uses free memory ({', '.join(grows)})" if grows else None
    table = Table("GiB of the fullest rank", *heads, caption=caption)
    for name in names:
        cells = []
        for phase in made.phases:
            found = [part for part in phase.parts if part.name == name]
            cells.append(gib(sum(part.likely for part in found)) if found else "")
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("together", *(gib(phase.likely) for phase in made.phases))
    table.add_row("needed at least, at most", *(f"{gib(phase.low)}, {gib(phase.high)}" for phase in made.phases))
    table.add_row(f"of {gib(made.capacity)}", *(_verdict(phase, made.capacity) for phase in made.phases))
    return table


def _verdict(phase: PhaseMemory, capacity: float) -> str:
    if phase.low > capacity:
        return "does not fit"
    return "fits" if phase.high <= capacity else "may not fit"


def time_table(made: Forecast) -> Table:
    """Seconds of every phase and its limit."""
    table = Table("phase", "estimated seconds", "fraction", "limit")
    for time in made.times:
        table.add_row(time.phase, f"{time.seconds:.2f}", f"{time.seconds / made.seconds:.0%}", time.bound)
    order = "generation beside the other phases" if made.overlaps else "phases one after the other"
    table.add_row("step", f"{made.seconds:.2f}", "", order)
    return table


def limits(made: Forecast) -> str:
    """The limits that bind, in a sentence each."""
    full, slow = made.fullest, max(made.times, key=lambda time: time.seconds)
    lines = [
        f"memory: {full.phase} needs the most, at most {gib(full.high)} of {gib(made.capacity)} GiB; its largest part "
        f"is {full.largest.name} (estimated {gib(full.largest.likely)}, at most {gib(full.largest.high)})",
        f"time: {slow.phase} takes the longest, bound by {slow.bound}",
    ]
    if made.uncounted:
        lines.append(f"not counted: {', '.join(made.uncounted)}, whose model is of a family of unknown sizes")
    if made.host_bytes:
        lines.append(f"host: {gib(made.host_bytes)} GiB of pinned memory for offloaded state per node")
    return "\n".join(lines)


def summary(made: Forecast) -> str:
    """Memory of each phase in a line, and the estimated step, for the head of a run."""
    phases = ", ".join(f"{phase.phase} {gib(phase.likely)}" for phase in made.phases)
    times = ", ".join(f"{time.phase} {time.seconds:.3g}" for time in made.times)
    doubt = [phase.phase for phase in made.phases if phase.high > made.capacity]
    warning = f"\n        {', '.join(doubt)} may not fit: see python -m skyrl_train.entrypoints.plan" if doubt else ""
    warning += f"\n        not counted: {', '.join(made.uncounted)}" if made.uncounted else ""
    return (
        f"memory  GiB of {gib(made.capacity)} by the forecast ({made.layout}): {phases}{warning}\n"
        f"time    seconds of a step, estimated for the longest samples: {times}"
        + (f"; {made.seconds:.3g} in all, as engines generate beside the trainers" if made.overlaps else "")
    )


def proposal_table(found: Sequence[Proposal]) -> Table:
    """The fastest proposals, and the given layout if it is one."""
    table = Table("", "layouts that fit", "GiB needed at most", "estimated s")
    for number, each in enumerate(_shown(found), 1):
        made = each.forecast
        table.add_row(str(number), str(made.layout), gib(made.fullest.high), f"{made.seconds:.2f}")
    return table


def proposal_lines(found: Sequence[Proposal]) -> str:
    """The overrides of each row of the table, a line each, to be copied."""
    none = "nothing to add: a run chooses open keys as above"
    lines = [f"{number}: {' '.join(each.overrides) or none}" for number, each in enumerate(_shown(found), 1)]
    return "\n".join(["overrides, fastest first:", *lines])


def _shown(found: Sequence[Proposal]) -> list[Proposal]:
    return [*found[:SHOWN], *(each for each in found[SHOWN:] if not each.overrides)]


OF_ENGINES = (
    "The trainers' layout does not change that. Raise generator.inference_engine_tensor_parallel_size, or change "
    "generator.gpu_memory_utilization or kv_cache_memory_gb if they are set"
)
"""What helps if an engine does not fit."""


def refusal(made: Forecast, found: Sequence[Proposal]) -> str:
    """The error for a run that cannot fit."""
    phase = max(made.impossible, key=lambda each: (each.device == ENGINE, each.low))
    parts = ", ".join(f"{part.name} {gib(part.likely)}" for part in phase.parts if part.likely > GIB / 10)
    if found:
        remedy = f"This fits: {' '.join(found[0].overrides)}"
    elif any(part.name == RESIDENT for part in phase.parts):
        remedy = "Set trainer.placement.release=offload, or null to have it chosen"
    elif phase.device == ENGINE and phase.phase != "generation":
        remedy = (
            "The trainers' layout does not change that. Raise trainer.teacher.inference_engine_tensor_parallel_size"
        )
    elif phase.phase == "generation":
        remedy = OF_ENGINES
    else:
        remedy = "No layout of up to 64 GPUs fits; take a smaller model or more device memory"
    return (
        f"trainer.policy.megatron_config is {made.layout}: {phase.phase} needs at least {gib(phase.low)} GiB of a "
        f"device with {gib(made.capacity)} GiB ({parts}). {remedy}"
    )


def numbers(made: Forecast, choices: Choices, found: Sequence[Proposal]) -> dict[str, Any]:
    """All numbers for a file; bytes and seconds."""
    return {
        "layout": str(made.layout),
        "choices": {key: value for choice in choices.made for key, value in choice.values},
        "fits": made.fits,
        "impossible": [phase.phase for phase in made.impossible],
        "uncounted": made.uncounted,
        "capacity": made.capacity,
        "host_bytes": made.host_bytes,
        "phases": [
            asdict(phase) | {"likely": phase.likely, "low": phase.low, "high": phase.high} for phase in made.phases
        ],
        "times": [asdict(time) for time in made.times],
        "proposals": [{"overrides": each.overrides, "seconds": each.forecast.seconds} for each in found],
    }
