"""Runs one function in several local processes that form one process group.

Without a GPU the processes are forked in 0.1 s, instead of 8 s of imports; with GPUs they are spawned, because CUDA
does not survive a fork. (Nor does a fork server help: with Transformer Engine, importing Megatron uses CUDA.) Results
are returned in files, because a tensor in a queue dies with its writer.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.device import device_type
from skyrl_train.ranks import LOOPBACK, Rendezvous
from skyrl_train.stores import listen


def run_on_ranks(
    function: Callable[[Rendezvous, Any], Any], argument: Any, world_size: int, *, timeout_s: float
) -> list[Any]:
    """Run `function(rendezvous, argument)` in `world_size` processes; returns its results by rank.

    The function joins the process group; its result is saved and loaded by torch. The calling process must not have
    used more than one thread for tensors (torch.set_num_threads(1)) nor a GPU.

    Raises: RuntimeError with the traceback of the first rank that failed, or if a rank takes longer than timeout_s. No
        process is left behind.
    """
    context: Any = multiprocessing.get_context("spawn" if device_type() == "cuda" else "fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        with listen(LOOPBACK) as listening:
            port = listening.getsockname()[1]
            for rank in range(world_size):
                held = listening if rank == 0 else None
                meeting = Rendezvous(rank, world_size, LOOPBACK, port, timeout_s, held)
                processes.append(context.Process(target=_work, args=(function, argument, meeting, folder), daemon=True))
            processes[0].start()
        for process in processes[1:]:  # without the socket: once rank 0 has died, nobody listens
            process.start()
        try:
            _wait(processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        # Any objects: this process's own children have just written them into its folder.
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world_size)]


def _wait(processes: list[Any], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = multiprocessing.connection.wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RuntimeError(f"ranks {sorted(running.values())} of {len(processes)} did not end within {timeout_s} s")
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            if not _result(folder, rank).exists():
                raise RuntimeError(_failure(folder, rank, processes[rank]))


def _failure(folder: Path, rank: int, process: Any) -> str:
    """The first traceback that was written: later ranks failed because their peer died."""
    written = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    if not written:
        process.join()
        return f"rank {rank} ended with exit code {process.exitcode} without a traceback"
    return f"rank {written[0].stem} failed:\n{written[0].read_text()}"


def _work(function: Callable[[Rendezvous, Any], Any], argument: Any, rendezvous: Rendezvous, folder: str) -> None:
    # After a fork, torch replaces its thread pool at the first use, which must not be by two threads at once.
    torch.set_num_threads(torch.get_num_threads())
    try:
        result = function(rendezvous, argument)
        file = _result(folder, rendezvous.rank)
        torch.save(result, file.with_suffix(".tmp"))
        if dist.is_initialized():
            # A rank that exits first would break the connections of the others.
            dist.barrier()
        file.with_suffix(".tmp").rename(file)
    except BaseException:
        Path(folder, f"{rendezvous.rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _result(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.pt")
