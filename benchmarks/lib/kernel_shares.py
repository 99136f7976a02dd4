"""What a traced piece of work spends its time on: kernels in groups by their names.

On a GPU these are kernels and copies, on a CPU torch's operations (their own time, on all threads). Streams that run
side by side each count, so the groups of a rank that communicates while it computes may add up to more than the whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from skyrl_train.device import device_type, synchronize

# The first that is found in the name counts: attention kernels are templates over matrix products, Adam's over adding.
GROUPS = {
    "communication": r"nccl|c10d::|all_?reduce|all_?gather|reduce_scatter",
    "attention": r"flash|sdpa|fmha|attention|cudnn::fusion",
    "matmul": r"nvjet|gemm|cutlass|cublas|splitk|^aten::(mm|addmm|bmm|baddbmm|_grouped_mm)$",
    "optimizer": r"multi_tensor|adam|l2norm|aten::_foreach",
    "norm": r"_norm_(forward|backward)|rms_?norm|layer_?norm",
    "swiglu": r"swiglu|gated_act|silu",
    "rotary": r"_rotate|rope|rotary|^aten::(cos|sin)$",
    "logprobs": r"_logprob_",
    "indexing": r"^_sums$|permute|index|gather|scatter|sort|topk|cumsum",
    "copies and additions": r"copy|memcpy|memset|fill|zero|catarray|functor\w*_add|aten::(add_?|cat|clone|_to_copy)$",
}
OTHER, IDLE = "other", "idle"
NO_KERNEL = re.compile(r"^(cu(da)?[A-Z]|(Command|Activity) Buffer|Buffer Flush|Instrumentation|Resource|Optimizer\.)")
"""The profiler's notes about itself, and spans such as Optimizer.step#Adam.step, which lie on the device's line too."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One kernel or operation."""

    name: str
    start_us: float
    end_us: float
    own_us: float
    """Without what it called."""


def group_of(name: str) -> str:
    """The group of a kernel's or operation's name."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def shares(ran: Iterable[Ran], whole_s: float) -> dict[str, float]:
    """Group -> its time as a share of the whole, the largest first; `idle` is where nothing ran at all."""
    ran = sorted(ran, key=lambda one: one.start_us)
    spent_us: dict[str, float] = {}
    busy_us, until_us = 0.0, 0.0
    for one in ran:
        group = group_of(one.name)
        spent_us[group] = spent_us.get(group, 0.0) + one.own_us
        busy_us += max(0.0, one.end_us - max(one.start_us, until_us))
        until_us = max(until_us, one.end_us)
    whole_us = whole_s * 1e6
    largest = sorted(spent_us.items(), key=lambda item: -item[1])
    return {group: us / whole_us for group, us in largest} | {IDLE: max(0.0, 1 - busy_us / whole_us)}


def trace(work: Callable[[], Any], file: str) -> dict[str, float]:
    """Run it once, write the table of its kernels to the file, and return their shares by group."""
    on_gpu = device_type() == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    synchronize()
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        work()
        synchronize()
        whole_s = time.perf_counter() - started
    with open(file, "w") as out:
        key = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        out.write(profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=110))
    return shares(_ran(profiler, "CUDA" if on_gpu else "CPU"), whole_s)


def _ran(profiler: Any, device: str) -> Iterable[Ran]:
    for event in profiler.events():
        if event.device_type.name != device or event.is_user_annotation or NO_KERNEL.search(event.name):
            continue
        span = event.time_range
        # A kernel calls nothing.
        own_us = event.self_cpu_time_total if device == "CPU" else span.elapsed_us()
        yield Ran(event.name, span.start, span.end, own_us)
