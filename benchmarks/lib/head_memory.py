"""Memory and time of the output layer with its logprobs and entropy over one micro-batch, on one GPU.

Counted is what is beside the weight, its float32 gradient and the hidden states, at the highest point: the gradient of
the hidden states, logits, and a few numbers per position. The gradient that autograd is given for the weight (a
stand-in, since the sum is in Megatron's buffer) comes last, when the logits are freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.megatron.passes.head import Head
from skyrl_train.megatron.passes.logprobs import Softmax
from skyrl_train.ranks import Rendezvous
from skyrl_train.stores import join_store

GIB = 2**30


@dataclass(frozen=True)
class HeadJob:
    """Sizes of the measured layer."""

    tokens: int
    vocabulary: int
    hidden: int
    with_entropy: bool


@dataclass(frozen=True)
class HeadUse:
    """One way to compute it."""

    way: str
    extra_gib: float
    forward_ms: float
    backward_ms: float


def measure(rendezvous: Rendezvous, job: HeadJob) -> list[HeadUse]:
    torch.cuda.set_device(rendezvous.rank)
    dist.init_process_group("nccl", store=join_store(rendezvous), rank=rendezvous.rank, world_size=1)
    weight = torch.randn(job.vocabulary, job.hidden, dtype=torch.bfloat16, device="cuda") / job.hidden**0.5
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    hidden = torch.randn(job.tokens, job.hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(0, job.vocabulary, (job.tokens, 1), device="cuda")
    group: Any = dist.group.WORLD
    softmax = Softmax(group, job.vocabulary, temperature=0.7)
    uses = []
    for way, recompute in (("scored, no backward", True), ("logits computed again", True), ("logits kept", False)):
        head = Head(softmax, weight, sequence_parallel=False, chunk=None, recompute=recompute)
        for _ in range(2):
            use = _use(way, head, hidden, ids, job.with_entropy)
        uses.append(use)
    dist.destroy_process_group()
    return uses


def _use(way: str, head: Head, hidden: torch.Tensor, ids: torch.Tensor, with_entropy: bool) -> HeadUse:
    scored = way.startswith("scored")
    x = hidden.detach().requires_grad_(not scored)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    with torch.set_grad_enabled(not scored):
        logprobs, entropy = head.logprobs(x, ids, with_entropy=with_entropy)
    events[1].record()
    if not scored:
        (logprobs.sum() - 0.01 * entropy.sum()).backward()
    events[2].record()
    torch.cuda.synchronize()
    head.weight.grad = None
    return HeadUse(
        way,
        (torch.cuda.max_memory_allocated() - before) / GIB,
        events[0].elapsed_time(events[1]),
        events[1].elapsed_time(events[2]),
    )
