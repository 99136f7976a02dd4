"""Who takes and gives back device memory, in files for pytorch.org/memory_viz."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from skyrl_train.device import device_type, synchronize

MAX_EVENTS = 200_000
"""The last allocations and releases that are kept, some hundred bytes to kilobytes of the host's memory each; an update
of 36 layers in 8 micro-batches has about 60,000, and the viewer becomes slow with files of some hundred megabytes."""

_log = logging.getLogger(__name__)


class MemoryHistory:
    """Records this process's allocations by torch from now on, each with the Python stack that asked for it.

    Memory that is taken past torch (NCCL's, kernels', the CUDA context's) is in no snapshot.
    """

    def __init__(self) -> None:
        """Raises: ValueError without a GPU."""
        if device_type() != "cuda":
            raise ValueError("torch_profiler_config.record_memory is true, and there is no GPU: set it to false")
        _record()

    @contextmanager
    def during(self, file: Path, *, wanted: bool) -> Iterator[None]:
        """Write what happens in the body to `file` if wanted; if torch runs out of memory, to `file` with `_oom`.

        Either has all that is held at its end, however long before it was taken, and the events of the body.
        """
        _record()
        try:
            yield
        except torch.OutOfMemoryError:
            _write_or_log(file.with_stem(f"{file.stem}_oom"))
            raise
        if wanted:
            synchronize()
            _write(file)


def _record() -> None:
    """Go on recording, or begin, with an empty list of events."""
    # C++ frames would take minutes to name when a snapshot is written.
    torch.cuda.memory._record_memory_history(
        "all", context="all", stacks="python", max_entries=MAX_EVENTS, clear_history=True
    )


def _write(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))


def _write_or_log(file: Path) -> None:
    """A disk that is full must not hide the error that is on its way."""
    try:
        _write(file)
    except Exception as error:
        _log.warning("no snapshot of device memory in %s: %s", file, error)
    else:
        _log.warning("out of device memory; who held it is in %s, for pytorch.org/memory_viz", file)
