"""Check that a parallel layout computes what Hugging Face computes, before thousands of GPU hours go into it.

    python -m skyrl_train.entrypoints.verify_layout model=PATH tp=2 pp=2 [vpp= cp= ep= etp= dp= sp= json=FILE ...]

One mini-batch of random tokens goes through the model at PATH under the requested layout, under one process, and
through Hugging Face's own model, in processes of this machine (one GPU each, or CPU). The tables show the differences
of gradients, logprobs and metrics. Where one process cannot hold the model (against=...), Hugging Face is compared with
the model made small only.
Exit code: 0 exact, 1 not exact, 2 the model or layout cannot work, or a process of it failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_train.entrypoints.layout_request import OPTIONS, AskedLayout, Request, read_request
from skyrl_train.megatron.verify.outcome import BFLOAT16, FLOAT32, Difference, Outcome, compare
from skyrl_train.types import Metrics

if TYPE_CHECKING:
    from skyrl_train.megatron.verify.trial import Trial

SHOWN_TENSORS = 12
HUGGING_FACE = "Hugging Face"


def main(argv: Sequence[str]) -> int:
    console = Console()
    if not argv or {"-h", "--help"} & set(argv):
        console.print(__doc__, markup=False, highlight=False)
        for name, text in OPTIONS.items():
            console.print(f"  {name + '=':20}{text}", markup=False, highlight=False)
        return 0
    try:
        request = read_request(argv)
        return verify(request, console)
    # None must end as "not exact". RuntimeError: a rank that failed, with its traceback; OSError: no such file.
    except (ValueError, RuntimeError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2


def verify(request: Request, console: Console) -> int:
    """Run both layouts and Hugging Face, print the tables; 0 if all agree, 1 if not."""
    # Here, so that a wrong command line is answered at once.
    from skyrl_train.checks.model_folder import checked_folder
    from skyrl_train.megatron.verify.hf_reference import comparable, run_hugging_face
    from skyrl_train.megatron.verify.layout_check import Layout, run_layout

    _, config = checked_folder("model", request.model)
    torch.set_num_threads(1)  # the processes are forked from this one where there is no GPU
    trial = _trial(request, config.vocab_size)
    whole, limit = int(trial.experience.cu_seqlens[-1]), request.micro_batch_tokens

    def run(layout: AskedLayout, max_tokens: int) -> Outcome:
        with console.status(f"one mini-batch in {layout.world_size} process(es)"):
            return run_layout(
                trial, Layout(layout.megatron, layout.world_size, max_tokens), timeout_s=request.timeout_s
            )

    reference = run(request.against, whole if request.against.world_size == 1 else limit)
    outcome = run(request.layout, limit)
    differences = {request.against.name: compare(outcome, reference)}
    if request.against.world_size == 1:
        with console.status("one mini-batch through Hugging Face"):
            hugging_face = run_hugging_face(trial, timeout_s=request.timeout_s)
        differences[HUGGING_FACE] = compare(comparable(outcome, hugging_face), hugging_face)
    bounds = BFLOAT16 if request.bf16 else FLOAT32
    broken = [f"{sentence} from {name}" for name, each in differences.items() for sentence in bounds.broken(each)]
    if request.json_file is not None:
        numbers = {name: dataclasses.asdict(each) for name, each in differences.items()}
        request.json_file.write_text(json.dumps({"exact": not broken, "broken": broken} | numbers, indent=1))
    for name, difference in differences.items():
        console.print(_table(request, name, difference, outcome.metrics))
    if broken:
        console.print("[bold red]not exact:[/] " + "; ".join(broken), highlight=False, soft_wrap=True)
        return 1
    console.print("[bold green]exact[/] up to rounding", highlight=False)
    return 0


def _table(request: Request, name: str, difference: Difference, metrics: Metrics) -> Table:
    table = Table("", "difference", title=f"{request.layout.name} against {name}")
    table.add_row(f"gradient, all {len(difference.tensors)} tensors", f"{difference.gradient:.1e}")
    worst = sorted(difference.tensors.items(), key=lambda item: -item[1])[:SHOWN_TENSORS]
    for name, error in worst:
        table.add_row(f"  {name}", f"{error:.1e}")
    if len(worst) < len(difference.tensors):
        table.add_row(f"  {len(difference.tensors) - len(worst)} more", f"at most {worst[-1][1]:.1e}")
    table.add_row("logprobs, over the largest", f"{difference.logprobs:.1e}")
    for name in ("policy/final_loss", "policy/grad_norm"):
        table.add_row(f"{name} ({metrics[name]:.6f})", f"{difference.metrics[name]:.1e}")
    table.add_row("metrics, largest", f"{difference.worst_metric[1]:.1e}")
    return table


def _trial(request: Request, vocabulary: int) -> Trial:
    """Random tokens with long and short responses."""
    from skyrl_train.megatron.verify.trial import random_trial

    shares = torch.rand(request.num_samples, generator=torch.Generator().manual_seed(0)).square()
    lengths = (2 + shares * (request.max_length - 2)).long()
    prompts = (lengths // 4).clamp(min=1)
    return random_trial(
        request.model, lengths.tolist(), prompts.tolist(), vocabulary, temperature=0.9, bf16=request.bf16
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
