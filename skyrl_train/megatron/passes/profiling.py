"""Traces and memory snapshots of chosen ranks and steps, and named spans for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from skyrl_train.config.policy import TorchProfilerConfig
from skyrl_train.device import device_type, synchronize
from skyrl_train.megatron.passes.snapshots import MemoryHistory


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name what happens inside: in a running trace, and as an NVTX range where there is a GPU."""
    on_gpu = device_type() == "cuda"
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


class Tracer:
    """Writes the passes of one rank in chosen steps to files.

    save_path/policy-0_step3_update.json.gz is a Chrome trace, policy-0_step3_update.pickle a snapshot of device memory.
    """

    def __init__(self, config: TorchProfilerConfig, model: str, rank: int) -> None:
        """Make it before the model, whose memory a snapshot would otherwise not explain.

        Args: model: "policy" or "reference".
        Raises: ValueError for snapshots without a GPU.
        """
        chosen = rank in config.ranks
        self._steps, self._traces = frozenset(config.steps if chosen else ()), config.enable
        self._history = MemoryHistory() if config.record_memory and chosen else None
        self._folder, self._name = Path(config.save_path), f"{model}-{rank}"
        self.step = 1
        """Of this process, counted from 1; whoever owns the tracer moves it on."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Trace the body and its memory if this is a chosen step; name it in any case."""
        chosen = self.step in self._steps
        file = self._folder / f"{self._name}_step{self.step}_{name}"
        history: AbstractContextManager[None] = nullcontext()
        trace: AbstractContextManager[None] = nullcontext()
        if self._history is not None:
            history = self._history.during(Path(f"{file}.pickle"), wanted=chosen)
        if chosen and self._traces:
            trace = _trace(Path(f"{file}.json.gz"))
        with history, trace, span(name):
            yield


@contextmanager
def _trace(file: Path) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device_type() == "cuda":
        activities.append(ProfilerActivity.CUDA)
    file.parent.mkdir(parents=True, exist_ok=True)
    synchronize()
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        synchronize()
    profiler.export_chrome_trace(str(file))
