"""How evenly three strategies spread long-tailed samples over data-parallel ranks and micro-batches.

    python -m benchmarks.studies.balance [--dp 8] [--max-tokens 16384] [--json FILE]

- `balanced`: skyrl_train.batching.
- `first-fit`: micro-batches filled in the order of the samples up to the token limit, their number rounded up to a
  multiple of the ranks with empty ones, dealt round robin.
- `equal rows`: each rank gets the same number of neighbouring samples, cut into micro-batches of a fixed number of rows
  that holds max_tokens on average; rows are padded to the longest of their micro-batch.

Imbalance is the heaviest rank's work over the mean, minus 1, always of the packed samples (the padding of `equal rows`
would make its ranks slower still). `floor` is the imbalance that a single longest sample makes unavoidable.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_train.batching.pack import Plan, distribute
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.hf.flops import ModelCost

Strategy = Callable[[Sequence[int], MicroBatchLimits], Plan]


def first_fit(lengths: Sequence[int], rules: MicroBatchLimits) -> Plan:
    bins: list[list[int]] = []
    free: list[int] = []
    for i, length in enumerate(lengths):
        size = rules.padded(length)
        fitting = next((b for b, left in enumerate(free) if size <= left), None)
        if fitting is None:
            bins.append([i])
            free.append(rules.max_tokens - size)
        else:
            bins[fitting].append(i)
            free[fitting] -= size
    bins += [[] for _ in range(-len(bins) % rules.dp_size)]
    return [bins[rank :: rules.dp_size] for rank in range(rules.dp_size)]


def equal_rows(lengths: Sequence[int], rules: MicroBatchLimits) -> Plan:
    per_rank = -(-len(lengths) // rules.dp_size)
    rows = max(1, rules.max_tokens * len(lengths) // sum(lengths))
    indices = list(range(len(lengths)))
    chunks = [indices[rank * per_rank : (rank + 1) * per_rank] for rank in range(rules.dp_size)]
    return [[chunk[start : start + rows] for start in range(0, per_rank, rows)] for chunk in chunks]


STRATEGIES: dict[str, Strategy] = {"balanced": distribute, "first-fit": first_fit, "equal rows": equal_rows}


def measure(name: str, mini_batches: Sequence[Sequence[int]], rules: MicroBatchLimits) -> dict[str, float]:
    """One strategy over the mini-batches of one step; the seconds are those of the cut."""
    heaviest = mean = floor = padded = 0.0
    num_micro_batches = num_empty = 0
    seconds = 0.0
    for lengths in mini_batches:
        start = time.perf_counter()
        plan = STRATEGIES[name](lengths, rules)
        seconds += time.perf_counter() - start
        loads = [sum(rules.cost(lengths[i]) for samples in rank for i in samples) for rank in plan]
        heaviest += max(loads)
        mean += sum(loads) / len(loads)
        floor += max(sum(loads) / len(loads), *(rules.cost(length) for length in lengths))
        micro_batches = [[rules.padded(lengths[i]) for i in samples] for rank in plan for samples in rank]
        dense = name == "equal rows"
        padded += sum(max(sizes, default=0) * len(sizes) if dense else sum(sizes) for sizes in micro_batches)
        num_micro_batches += len(plan[0])
        num_empty += sum(not sizes for sizes in micro_batches)
    return {
        "imbalance": heaviest / mean - 1,
        "floor": floor / mean - 1,
        "padding": 1 - sum(map(sum, mini_batches)) / padded,
        "micro_batches": num_micro_batches,
        "empty": num_empty,
        "ms": seconds * 1e3,
    }


def long_tailed(num_samples: int, seed: int, longest: int) -> list[int]:
    """Lognormal, median 1,500 tokens, a fifth over 3,800, cut off at `longest`: responses of a reasoning model."""
    draw = random.Random(seed)
    return [min(longest, max(16, int(draw.lognormvariate(math.log(1500), 1.1)))) for _ in range(num_samples)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024, help="of one step")
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4, 8, 16], help="data-parallel ranks")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="of one micro-batch")
    parser.add_argument("--longest", type=int, default=32768, help="tokens")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()

    # Qwen2.5-1.5B: 28 layers, 12 heads of 128.
    model = ModelCost(matrix_weights=1_540_000_000, attention_width=28 * 12 * (128 + 128))
    per_mini_batch = arguments.samples // arguments.mini_batches
    rows = []
    for dp_size in arguments.dp:
        for max_tokens in arguments.max_tokens:
            rules = MicroBatchLimits(
                dp_size=dp_size,
                max_tokens=max_tokens,
                max_sample_tokens=arguments.longest,
                pad_multiple=8,
                attention_cost_ratio=model.attention_ratio,
            )
            for name in STRATEGIES:
                steps = []
                for seed in range(arguments.seeds):
                    lengths = long_tailed(arguments.samples, seed, arguments.longest)
                    cut = [lengths[i : i + per_mini_batch] for i in range(0, arguments.samples, per_mini_batch)]
                    steps.append(measure(name, cut, rules))
                mean = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
                worst = max(step["imbalance"] for step in steps)
                rows.append({"dp": dp_size, "max_tokens": max_tokens, "strategy": name, "worst": worst, **mean})
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def print_table(rows: Sequence[dict[str, float | str | int]]) -> None:
    print(
        f"{'dp':>3} {'max_tokens':>10}  {'strategy':<10} {'imbalance':>9} {'worst':>7} {'floor':>7} {'padding':>8} "
        f"{'micro-batches':>13} {'empty':>6} {'ms':>6}"
    )
    for row in rows:
        print(
            f"{row['dp']:>3} {row['max_tokens']:>10,}  {row['strategy']:<10} {row['imbalance']:>9.2%} "
            f"{row['worst']:>7.2%} {row['floor']:>7.2%} {row['padding']:>8.2%} {row['micro_batches']:>13.1f} "
            f"{row['empty']:>6.1f} {row['ms']:>6.1f}"
        )


if __name__ == "__main__":
    main()
