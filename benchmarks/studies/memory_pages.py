"""What giving a step's memory back and taking it again costs in pages of different sizes, on one GPU.

    python -m benchmarks.studies.memory_pages [--page-mib 0 20 64 256] [--gib 60] [--offloaded-gb 7.2]

For each size a process of its own in turns of: tensors of 180 MiB until --gib are mapped, then freed; --offloaded-gb
copied to pinned host memory, all of both given back, the same copied back. Milliseconds, median of the turns after the
first. 0 stands for cudaMalloc, without pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

TURNS, TENSOR_BYTES = 4, 180 << 20
PARTS = ("map", "copy out", "give back", "come back")


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def turns(page_mib: int, gib: float, offloaded_gb: float) -> list[list[float]]:
    """Of each turn the parts."""
    if page_mib:
        settings = f"expandable_segments:True,large_segment_size_mb:{page_mib}"
        torch._C._accelerator_setAllocatorSettings(settings)  # type: ignore[attr-defined]
    num_bytes = int(offloaded_gb * 1e9)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    storage = there.untyped_storage()

    def fill() -> None:
        held = [
            torch.empty(TENSOR_BYTES, dtype=torch.uint8, device="cuda") for _ in range(int(gib * 2**30) // TENSOR_BYTES)
        ]
        del held

    def give_back() -> None:
        storage.resize_(0)
        torch.cuda.empty_cache()

    def come_back() -> None:
        storage.resize_(num_bytes)
        there.copy_(host, non_blocking=True)

    out = lambda: host.copy_(there, non_blocking=True)  # noqa: E731
    return [[timed(work) for work in (fill, out, give_back, come_back)] for _ in range(TURNS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-mib", type=int, nargs="+", default=[0, 20, 64, 256])
    parser.add_argument("--gib", type=float, default=60.0)
    parser.add_argument("--offloaded-gb", type=float, default=7.2)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    if args.one:
        print(json.dumps(turns(args.page_mib[0], args.gib, args.offloaded_gb)))
        return 0
    found: dict[int, dict[str, float]] = {}
    table = Table("pages of MiB", *PARTS, title=f"ms for {args.gib:g} GiB given back, {args.offloaded_gb:g} GB copied")
    for size in args.page_mib:
        sizes = ["--page-mib", str(size), "--gib", str(args.gib), "--offloaded-gb", str(args.offloaded_gb)]
        ran = subprocess.run([sys.executable, __file__, "--one", *sizes], stdout=subprocess.PIPE, check=True, text=True)
        columns = zip(*json.loads(ran.stdout.splitlines()[-1])[1:], strict=True)
        found[size] = dict(zip(PARTS, map(statistics.median, columns), strict=True))
        table.add_row(str(size or "none"), *(f"{ms:.0f}" for ms in found[size].values()))
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
