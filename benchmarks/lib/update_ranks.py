"""One rank of step.py's update: MegatronPolicy.update, and in turns with it the same work in a bare Megatron loop.

The bare loop knows micro-batches that lie on the device already, Megatron's schedule, a mean of logprobs as its loss,
and the optimizer; no packing, no metrics, no timers. What the framework adds is the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.lib.kernel_shares import trace
from benchmarks.lib.update_parts import measure_parts
from skyrl_train.algorithms.losses.ppo import regular
from skyrl_train.algorithms.objective import Bound, Objective, Term
from skyrl_train.batching.split import split
from skyrl_train.config.policy import LoraConfig, MegatronConfig, OptimizerConfig
from skyrl_train.device import device, peak_flops, synchronize
from skyrl_train.megatron.passes.pipeline import between_stages
from skyrl_train.megatron.passes.step import head_of
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import Layout, rules
from skyrl_train.ranks import Rendezvous
from skyrl_train.types import ExperienceBatch, TrainBatch

POLICY_TERM = Term("policy", Bound(regular, {"eps_clip_low": 0.2, "eps_clip_high": 0.2}))
OBJECTIVE = Objective((POLICY_TERM,), temperature=1.0)


@dataclass(frozen=True)
class Job:
    """What every rank is given."""

    model_path: str
    megatron: MegatronConfig
    optimizer: OptimizerConfig
    lora: LoraConfig
    num_samples: int
    sample_tokens: int
    """Tokens of a sample; with `spread`, of the longest."""
    spread: bool
    """Lengths between an eighth of sample_tokens and all of it, instead of all the same."""
    max_tokens: int
    bf16: bool
    warm_up: int = 0
    steps: int = 1
    logits: bool = False
    """Compare updates that keep logits for backward with updates that compute them again."""
    parts: bool = False
    """Time the parts of an update too."""
    trace: str | None = None
    """File to write the kernels of one update of rank 0 to."""


def experience(job: Job, vocab_size: int) -> ExperienceBatch:
    """Random tokens in groups of eight; the first eighth of each sample is its prompt."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.full((job.num_samples,), job.sample_tokens)
    if job.spread:
        lengths = torch.randint(job.sample_tokens // 8, job.sample_tokens + 1, (job.num_samples,), generator=draw)
    total = int(lengths.sum())
    mask = torch.cat([torch.arange(length) >= length // 8 for length in lengths.tolist()])
    return ExperienceBatch(
        token_ids=torch.randint(0, vocab_size, (total,), generator=draw),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        loss_mask=mask,
        group_ids=torch.arange(job.num_samples) // 8,
        rollout_logprobs=torch.full((total,), -11.9),
        staleness=torch.zeros(total, dtype=torch.int32),
        rewards=torch.zeros(total, dtype=torch.float64),
    )


def build(rendezvous: Rendezvous, job: Job) -> tuple[MegatronPolicy, TrainBatch]:
    """The policy of this rank and its shard of the mini-batch."""
    policy = MegatronPolicy(
        rendezvous,
        job.model_path,
        job.megatron,
        job.optimizer,
        OBJECTIVE,
        bf16=job.bf16,
        seed=1,
        num_optimizer_steps=1000,
        lora=job.lora,
    )
    stages = job.megatron.pipeline_model_parallel_size
    layout = Layout(job.megatron, rendezvous.world_size, job.max_tokens, min_micro_batches=stages)
    shards = split(
        experience(job, int(policy.model.bridge.hf_config.vocab_size)),
        rules(layout, policy.ranks.dp_size),
    )
    batch = shards[policy.ranks.dp_rank]
    advantages = torch.randn(len(batch.token_ids), generator=torch.Generator().manual_seed(2))
    return policy, replace(batch, signals={**batch.signals, "advantages": advantages})


def run(rendezvous: Rendezvous, job: Job) -> dict[str, Any]:
    """Seconds of each measured step, both ways, and what the first way reports of itself."""
    policy, batch = build(rendezvous, job)
    place = policy.ranks
    logprob_s = [timed(lambda: policy.prompt_logprobs(batch)) for _ in range(2)][-1]
    reports, seconds, bare, peak_bytes = [], [], [], 0
    bare_step = _bare_step(policy, batch)
    for _ in range(job.warm_up + job.steps):  # in turns, so that a device that slows down slows both
        _reset_peak()
        seconds.append(timed(lambda: reports.append(policy.update(batch))))
        peak_bytes = max(peak_bytes, _peak_bytes())
        bare.append(timed(bare_step))
    logits = _compare_logits(policy, batch, job) if job.logits else {}
    parts = measure_parts(policy, batch, job.steps) if job.parts else {}
    kernels: dict[str, float] = {}
    if job.trace and rendezvous.rank == 0:
        kernels = trace(lambda: policy.update(batch), job.trace)
    elif job.trace:
        policy.update(batch)
    measured = reports[job.warm_up :]
    return {
        "update_s": seconds[job.warm_up :],
        "first_update_s": seconds[0],
        "bare_s": bare[job.warm_up :],
        "logprob_s": logprob_s,
        "schedule_s": [report.schedule_seconds for report in measured],
        "busy_s": [report.busy_seconds for report in measured],
        "flops": measured[-1].train_flops if place.reports else 0.0,
        "tokens": len(batch.token_ids) if place.reports else 0,
        "micro_batches": len(batch.mini_batches[0]),
        "metrics": measured[-1].metrics,
        "peak_flops": peak_flops(),
        "peak_bytes": peak_bytes,
        "torch_layers": policy.model.torch_layers,
        "logits": logits,
        "parts_s": parts,
        "kernel_shares": kernels,
    }


def _compare_logits(policy: MegatronPolicy, batch: TrainBatch, job: Job) -> dict[str, list[float]]:
    """Seconds and peak bytes of updates with recompute_logits false and true, in turns."""
    model = policy.model
    found: dict[str, list[float]] = {name: [] for name in ("kept_s", "again_s", "kept_peak_bytes", "again_peak_bytes")}
    for _ in range(1 + job.steps):
        for name, recompute in (("kept", False), ("again", True)):
            policy.model = replace(model, recompute_logits=recompute)
            _reset_peak()
            found[f"{name}_s"].append(timed(lambda: policy.update(batch)))
            found[f"{name}_peak_bytes"].append(_peak_bytes())
    policy.model = model
    return {name: values[1:] for name, values in found.items()}


def timed(work: Any) -> float:
    """Seconds of the work on the slowest rank."""
    synchronize()
    dist.barrier()
    started = time.perf_counter()
    work()
    synchronize()
    dist.barrier()
    return time.perf_counter() - started


def _bare_step(policy: MegatronPolicy, batch: TrainBatch) -> Callable[[], None]:
    model, optimizer = policy.model, policy._optimizer
    micro_batches = [policy._packer.pack(batch, samples) for samples in batch.mini_batches[0]]
    num_tokens = sum(len(one.token_slice) for one in micro_batches)
    keep_dtype = {"fp32_output": False} if model.dtype == torch.bfloat16 else {}

    def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
        one = next(batches)
        output = chunk(
            input_ids=one.token_ids,
            position_ids=one.position_ids,
            attention_mask=None,
            packed_seq_params=one.packed,
            **keep_dtype,
        )

        def loss(hidden: torch.Tensor) -> Any:
            head = head_of(model, temperature=1.0)
            logprobs, _ = head.logprobs(hidden[0], one.targets.labels[:, None], with_entropy=False)
            value = -logprobs.sum() / num_tokens
            return value, torch.tensor(0, dtype=torch.int), {"loss": value.detach().clone()}

        return output, loss

    def step() -> None:
        model.bridge.config.timers = None
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=len(micro_batches),
            seq_length=int(micro_batches[0].token_ids.shape[1]),
            micro_batch_size=1,
            forward_only=False,
            # As an update does: waiting for Megatron's own messages would hide a part of what the update costs.
            **between_stages(model.bridge.config, micro_batches, len(model.chunks)),
        )
        optimizer.step()

    return step


def _reset_peak() -> None:
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
