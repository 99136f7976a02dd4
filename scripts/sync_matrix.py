"""Compare a synced engine with fresh ones for every kind of model, layout, dtype and transport; write the table.

    python -m scripts.sync_matrix [--kinds "dense tied,experts"] [--check]

Takes about five minutes on two idle cores. Without --check the table in docs/readings/weight_sync.md is replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).parents[1]
warnings.simplefilter("ignore")

import torch  # noqa: E402

from tests.support.engine_host import engine_host  # noqa: E402
from tests.support.sync_proof import KINDS, Case, Round, all_cases, prove, write_kind  # noqa: E402

PAGE = ROOT / "docs/readings/weight_sync.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->"
COLUMNS = [("one process", "shm"), ("PP2", "shm"), ("PP2", "broadcast"), ("TP2", "shm"), ("EP2", "shm")]


def count(rounds: list[Round]) -> tuple[int, int]:
    """(tokens and logprobs compared, how many of them differ)"""
    pairs = [
        (mine, theirs)
        for one in rounds
        for (tokens, rows), (other_tokens, other_rows) in zip(one.synced, one.fresh, strict=True)
        for mine, theirs in [
            *zip(tokens, other_tokens, strict=True),
            *((a, b) for row, other in zip(rows, other_rows, strict=True) for a, b in zip(row, other, strict=True)),
        ]
    ]
    return len(pairs), sum(mine != theirs for mine, theirs in pairs)


def table(counts: dict[Case, tuple[int, int]]) -> str:
    """Markdown: in each cell, how many of how many numbers differ."""
    lines = ["| model, dtype | " + " | ".join(f"{sizes}, {transport}" for sizes, transport in COLUMNS) + " |"]
    lines.append("|---" * (1 + len(COLUMNS)) + "|")
    for kind, dtype_name in dict.fromkeys((case.kind, case.dtype_name) for case in counts):
        found = [counts.get(Case(kind, sizes, dtype_name, transport)) for sizes, transport in COLUMNS]
        cells = ["" if one is None else f"{one[1]} of {one[0]}" for one in found]
        lines.append(f"| {kind}, {dtype_name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help="comma separated; all by default")
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if anything differs")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else list(KINDS)
    torch.set_num_threads(1)
    counts: dict[Case, tuple[int, int]] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with engine_host(root, "synced") as synced, engine_host(root, "fresh") as fresh:
            sources = {kind: write_kind(kind, root / kind.replace(" ", "_")) for kind in kinds}
            for number, case in enumerate(one for one in all_cases() if one.kind in kinds):
                counts[case] = count(prove(case, synced, fresh, sources[case.kind], root / str(number)))
                print(f"{case}: {counts[case][1]} of {counts[case][0]} differ", flush=True)
    print(f"{len(counts)} combinations in {time.perf_counter() - started:.0f} s")
    if not arguments.check:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        date = time.strftime("%Y-%m-%d")
        words = f"`python -m scripts.sync_matrix`, {date}, without a GPU (numbers that differ, of those compared):\n\n"
        PAGE.write_text(before + BEGIN + words + table(counts) + END + after)
    return int(any(different for _, different in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
