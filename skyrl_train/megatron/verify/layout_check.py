"""One mini-batch under a parallel layout, in processes of this machine.

The parts are those of a training step: batching.split, Packer, forward_backward, the distributed optimizer. The tests
and `entrypoints/verify_layout.py` use it and compare the outcomes (outcome.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.select import selections_of
from skyrl_train.batching.split import split
from skyrl_train.config.policy import MegatronConfig, OptimizerConfig
from skyrl_train.megatron.model.model import Model, build_model, dtype_of
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.passes.metrics import update_metrics
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.step import batch_logprobs_and_entropy, forward_backward
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import Outcome
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.megatron.weights.export import export, export_adapter
from skyrl_train.megatron.weights.gather import gather_json
from skyrl_train.ranks import ParallelRanks, Rendezvous, pad_multiple
from skyrl_train.types import ExperienceBatch, Metrics, TrainBatch

OPTIMIZER = OptimizerConfig(
    lr=0.0,
    adam_betas=(0.9, 0.999),
    adam_eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    scheduler="constant_with_warmup",
    num_warmup_steps=0,
    min_lr_ratio=0.0,
)
"""A learning rate of 0: of the optimizer step only the norm of the gradient is used."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A parallel layout and its micro-batches."""

    megatron: MegatronConfig
    world_size: int
    max_tokens: int
    """Padded tokens per micro-batch, at most."""
    min_micro_batches: int = 1


def run_layout(trial: Trial, layout: Layout, *, timeout_s: float = 120.0) -> Outcome:
    """Run the trial in `layout.world_size` processes of this machine. Raises: like `run_objectives`."""
    return run_objectives(trial, layout, [trial.objective], timeout_s=timeout_s)[0]


def run_objectives(
    trial: Trial, layout: Layout, objectives: Sequence[Objective], *, timeout_s: float = 120.0
) -> list[Outcome]:
    """One pass per objective over the same batch and model; all have the trial's reductions and temperature.
    Raises: RuntimeError with the traceback of the first rank that failed.
    """
    arguments = (trial, layout, tuple(objectives))
    of_ranks = run_on_ranks(_run_rank, arguments, layout.world_size, timeout_s=timeout_s)
    return [_joined(trial, parts) for parts in zip(*of_ranks, strict=True)]


def _joined(trial: Trial, parts: Sequence[dict[str, Any]]) -> Outcome:
    """Args: parts: of each rank."""
    gradients: dict[str, Tensor] = {}
    logprobs = torch.full(trial.experience.token_ids.shape, math.nan)
    metrics: Metrics = {}
    for part in parts:
        twice = gradients.keys() & part["gradients"].keys()
        assert not twice, f"exported by two ranks: {sorted(twice)}"
        gradients |= part["gradients"]
        metrics = metrics or part["metrics"]
        if part["logprobs"] is not None:
            logprobs[_token_indices(trial.experience, part["sample_ids"])] = part["logprobs"]
    assert not logprobs.isnan().any(), "no rank computed the logprobs of some samples"
    return Outcome(gradients, logprobs, metrics)


def rules(layout: Layout, dp_size: int) -> MicroBatchLimits:
    """Limits for splitting a mini-batch in the layout."""
    megatron = layout.megatron
    tp = megatron.tensor_model_parallel_size
    return MicroBatchLimits(
        dp_size=dp_size,
        max_tokens=layout.max_tokens,
        max_sample_tokens=2**31 - 1,
        pad_multiple=pad_multiple(tp if megatron.sequence_parallel else 1, megatron.context_parallel_size),
        min_micro_batches=layout.min_micro_batches,
        micro_batch_multiple=megatron.pipeline_model_parallel_size
        if megatron.virtual_pipeline_model_parallel_size
        else 1,
    )


def share_of(trial: Trial, layout: Layout, ranks: ParallelRanks, *, num_mini_batches: int = 1) -> TrainBatch:
    """The trial's batch of the rank's data-parallel shard, split into mini-batches."""
    shards = split(
        trial.experience,
        rules(layout, ranks.dp_size),
        num_mini_batches=num_mini_batches,
        reductions=trial.objective.reductions,
        max_lengths=trial.max_lengths,
    )
    batch = shards[ranks.dp_rank]
    advantages = trial.advantages[_token_indices(trial.experience, batch.sample_ids)]
    return replace(batch, signals={**batch.signals, "advantages": advantages})


def _token_indices(experience: ExperienceBatch, sample_ids: Tensor) -> Tensor:
    """Indices of the samples' tokens in the experience, end to end."""
    bounds = experience.cu_seqlens.tolist()
    return torch.cat(
        [torch.zeros(0, dtype=torch.int64)] + [torch.arange(bounds[i], bounds[i + 1]) for i in sample_ids.tolist()]
    )


def _run_rank(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, tuple[Objective, ...]]) -> list[dict[str, Any]]:
    """Returns: per objective, this rank's part of the outcome."""
    trial, layout, objectives = arguments
    ranks = join(rendezvous, layout.megatron, seed=1)
    batch = share_of(trial, layout, ranks)
    model = build_model(trial.model_path, layout.megatron, dtype_of(trial.bf16), trainable=True, lora=trial.lora)
    optimizer = build_optimizer(model, OPTIMIZER)
    packer = Packer.of_layout(sequence_parallel=model.bridge.config.sequence_parallel)
    logprobs, entropy = batch_logprobs_and_entropy(
        model,
        packer,
        batch,
        trial.objective.temperature,
        with_entropy=any("old_entropy" in objective.selection_needs for objective in objectives),
    )
    tokens = _token_indices(trial.experience, batch.sample_ids)
    signals = {}
    if logprobs is not None:
        signals["old_logprobs"] = logprobs + trial.old_offsets[tokens]
        signals["ref_logprobs"] = signals["teacher_logprobs"] = logprobs + trial.ref_offsets[tokens]
        signals |= {name: values[tokens] for name, values in trial.teacher_signals.items()}
    old = {"old_logprobs": signals.get("old_logprobs"), "old_entropy": entropy}
    results = []
    for objective in objectives:
        chosen = _selections(trial, objective, ranks, tokens, old) if objective.selections else {}
        inputs = signals | {name: of_all[tokens] for name, of_all in chosen.items()}
        if objective.approximates:
            inputs.pop("old_logprobs", None)
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        micro_batches = [packer.pack(batch, samples, inputs) for samples in batch.mini_batches[0]]
        one_pass = forward_backward(model, micro_batches, objective, with_entropy=True)
        gradients = _gradients(model)
        _, norm, _ = optimizer.step()
        results.append(
            {
                "gradients": gradients if ranks.owns_stage else {},
                "logprobs": logprobs if ranks.reports else None,
                "sample_ids": batch.sample_ids,
                "metrics": update_metrics([one_pass], [float(norm)], lr=0.0),
            }
        )
    return results


def _gradients(model: Model) -> dict[str, Tensor]:
    """Gradient of every trained tensor of this rank's stage, under Hugging Face's names; a collective."""
    _gather_gradients(model)
    trained = export(model, torch.float32, read=_gradient)
    named = trained if model.lora is None else export_adapter(model.lora, read=_gradient)
    return {name: gradient.to("cpu", copy=True) for name, gradient in named}


def _selections(
    trial: Trial, objective: Objective, ranks: ParallelRanks, tokens: Tensor, signals: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """[T] bool of the whole mini-batch, as the driver computes them from the shards of all ranks."""
    own = {name: values.tolist() for name, values in signals.items() if values is not None and ranks.reports}
    whole: dict[str, Tensor] = {}
    for indices, values in gather_json((tokens.tolist(), own)):
        for name, part in values.items():
            at = torch.tensor(indices, dtype=torch.int64)
            whole.setdefault(name, torch.zeros(len(trial.advantages)))[at] = torch.tensor(part)
    return selections_of(objective, trial.experience, trial.advantages, whole)


def _gather_gradients(model: Model) -> None:
    """Gather the whole gradient on every data-parallel rank; the distributed optimizer reduces each shard on one."""
    for chunk in model.chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)


def _gradient(tensor: Tensor) -> Tensor:
    """A `read` for `export`: the gradient, 0 for buffers (the routers' expert bias) and frozen parameters."""
    gradient = getattr(tensor, "main_grad", None)
    return torch.zeros_like(tensor, dtype=torch.float32) if gradient is None else gradient.view(tensor.shape).detach()
