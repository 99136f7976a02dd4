"""Traces of chosen ranks and steps with torch's profiler, and named spans for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from skyrl_train.config_policy import TorchProfilerConfig
from skyrl_train.device import device_type, synchronize


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
    """Writes the passes of one rank in chosen steps as Chrome traces: save_path/policy-0_step3_update.json.gz."""

    def __init__(self, config: TorchProfilerConfig, model: str, rank: int) -> None:
        """Args: model: "policy" or "reference"."""
        self._steps = frozenset(config.steps if config.enable and rank in config.ranks else ())
        self._folder, self._name = Path(config.save_path), f"{model}-{rank}"
        self.step = 1
        """Of this process, counted from 1; whoever owns the tracer moves it on."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Trace the body if this is a chosen step; name it in any case."""
        if self.step not in self._steps:
            with span(name):
                yield
            return
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if device_type() == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._folder.mkdir(parents=True, exist_ok=True)
        synchronize()
        with profile(activities=activities, record_shapes=True) as profiler, span(name):
            yield
            synchronize()
        profiler.export_chrome_trace(str(self._folder / f"{self._name}_step{self.step}_{name}.json.gz"))
