"""Peak memory of logprobs and entropy, forward and backward, over one long micro-batch.

    python -m benchmarks.studies.logprob_memory [--tokens 32768] [--vocabulary 151936] [--json FILE]

The logits are bfloat16 and belong to the model; counted is what the logprobs take beside them at the highest point, in
units of the logits' own size. At least 1 is the gradient of the logits. Needs a GPU with room for the logits three
times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from skyrl_train.megatron.passes.logprobs import Softmax, vocab_parallel_logprobs

TARGET = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this benchmark reads a GPU's memory, and there is none here", file=sys.stderr)
        return 2
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    rows = [measure(args.tokens, args.vocabulary, with_entropy) for with_entropy in (False, True)]
    table = Table("entropy", "logits GiB", "extra GiB", "extra / logits", "forward ms", "backward ms")
    for row in rows:
        table.add_row(
            str(row["with_entropy"]),
            f"{row['logits_gib']:.2f}",
            f"{row['extra_gib']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['forward_ms']:.1f}",
            f"{row['backward_ms']:.1f}",
        )
    Console().print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), **vars(args), "rows": rows}, default=str)
        )
    dist.destroy_process_group()
    return 0 if all(row["ratio"] <= TARGET for row in rows) else 1


def measure(tokens: int, vocabulary: int, with_entropy: bool) -> dict[str, float]:
    """Peak over one forward and backward pass, after a pass that warms up."""
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    weights = torch.rand(tokens, device="cuda")
    group = dist.group.WORLD
    assert group is not None, "of one rank, from main()"
    softmax = Softmax(group, vocabulary, temperature=0.7, chunk=1024)  # the chunk is of the way without a kernel
    for _ in range(2):
        logits.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        logprobs, entropy = vocab_parallel_logprobs(logits, labels, softmax, with_entropy=with_entropy)
        loss = -(logprobs * weights).sum() - 0.01 * (entropy * weights).sum()
        events[1].record()
        loss.backward()
        events[2].record()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
    size = logits.numel() * logits.element_size()
    return {
        "with_entropy": with_entropy,
        "logits_gib": size / 2**30,
        "extra_gib": extra / 2**30,
        "ratio": extra / size,
        "forward_ms": events[0].elapsed_time(events[1]),
        "backward_ms": events[1].elapsed_time(events[2]),
    }


if __name__ == "__main__":
    sys.exit(main())
