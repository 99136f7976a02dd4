"""Traces and memory snapshots of chosen ranks and steps, and named spans for Nsight Systems."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from skyrl_train.config.policy import TorchProfilerConfig
from skyrl_train.device import device_type, synchronize

MAX_EVENTS = 200_000
"""Allocations and frees that are kept, the last ones, with some hundred bytes to kilobytes of host memory each. An
update of 36 layers in 8 micro-batches has about 60,000; the viewer is slow with files of some hundred megabytes."""

_log = logging.getLogger(__name__)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name the body in a running trace, and as an NVTX range on a GPU."""
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

    save_path/policy-0_step3_update.json.gz is a Chrome trace, policy-0_step3_update.pickle a snapshot of device memory
    for pytorch.org/memory_viz. A snapshot has torch's allocations, each with its Python stack; memory of NCCL, kernels
    and the CUDA context is in none.
    """

    def __init__(self, config: TorchProfilerConfig, model: str, rank: int) -> None:
        """Create it before the model, whose memory a snapshot would otherwise not explain.

        Args: model: "policy" or "reference".
        Raises: ValueError for snapshots without a GPU.
        """
        chosen = rank in config.ranks
        self._steps, self._traces = frozenset(config.steps if chosen else ()), config.enable
        self._snapshots = config.record_memory and chosen
        if self._snapshots and device_type() != "cuda":
            raise ValueError("torch_profiler_config.record_memory is true, but there is no GPU. Set it to false")
        if self._snapshots:
            _record_memory()
        self._folder, self._name = Path(config.save_path), f"{model}-{rank}"
        self.step = 1
        """Step of this process, from 1; the owner of the tracer increments it."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Trace the body and its memory if this is a chosen step; name it in any case."""
        chosen = self.step in self._steps
        file = self._folder / f"{self._name}_step{self.step}_{name}"
        snapshot: AbstractContextManager[None] = nullcontext()
        trace: AbstractContextManager[None] = nullcontext()
        if self._snapshots:
            snapshot = _snapshot(Path(f"{file}.pickle"), wanted=chosen)
        if chosen and self._traces:
            trace = _trace(Path(f"{file}.json.gz"))
        with snapshot, trace, span(name):
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


@contextmanager
def _snapshot(file: Path, *, wanted: bool) -> Iterator[None]:
    """Write the body's allocations to `file` if wanted; if torch runs out of memory, to `file` with `_oom`.

    Either has all memory held at its end, whenever it was allocated, and the events of the body.
    """
    _record_memory()
    try:
        yield
    except torch.OutOfMemoryError:
        file = file.with_stem(f"{file.stem}_oom")
        try:
            _write_snapshot(file)
        except Exception as error:  # a full disk must not hide the first error
            _log.warning("snapshot of device memory %s could not be written: %s", file, error)
        else:
            _log.warning("out of device memory; the snapshot %s shows its holders (pytorch.org/memory_viz)", file)
        raise
    if wanted:
        synchronize()
        _write_snapshot(file)


def _record_memory() -> None:
    """Record allocations from now on, with an empty list of events."""
    # C++ frames would take minutes to name when a snapshot is written.
    torch.cuda.memory._record_memory_history(
        "all", context="all", stacks="python", max_entries=MAX_EVENTS, clear_history=True
    )


def _write_snapshot(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
