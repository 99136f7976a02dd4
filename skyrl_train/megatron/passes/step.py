"""Forward-only and forward-backward passes over the micro-batches of a mini-batch, through Megatron's schedules.

`forward_backward_func` is called once per mini-batch with all its micro-batches, so that a pipeline overlaps them.
Losses are plain sums of `term * loss_weights`: with `calculate_per_token_loss` and a token count of 0 neither the
schedule, nor the data-parallel wrapper, nor `finalize_model_grads` scales anything (megatron-core 0.16 and 0.19), so
the gradient is the exact sum over all ranks and micro-batches. Nothing in a pass moves a tensor to the host; metrics
are copied once per mini-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import LOSSES
from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.reductions import weighted_sum
from skyrl_train.device import finish_computing
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.passes.logprobs import vocab_parallel_logprobs
from skyrl_train.megatron.passes.packing import MicroBatch, Targets, unpack
from skyrl_train.megatron.passes.pipeline import between_stages, forget_messages


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """Sums and largest values over a mini-batch, equal on all ranks of the last pipeline stage."""

    sums: dict[str, float]
    """`tokens`, and sums over the tokens that the policy wrote or over all weighted terms (`*_loss`)."""
    largest: dict[str, float]
    seconds: float
    busy_seconds: float
    """Time that this rank spent computing, of `seconds`."""


class ComputeTimers:
    """The timers that Megatron's schedules start and stop around each forward and backward of a micro-batch.

    On the CPU the wall clock; on a GPU CUDA events, read after the pass, so that nothing waits in between.
    """

    COUNTED = ("forward-compute", "backward-compute")

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._name = ""

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimers:
        self._name = name
        return self

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, barrier: bool = False) -> None:
        if self._name in self.COUNTED:
            self._start = self._now()

    def stop(self, barrier: bool = False) -> None:
        if self._name in self.COUNTED:
            self._spans.append((self._start, self._now()))

    def seconds(self) -> float:
        """Call it after the device was synchronised."""
        if self._on_gpu:
            return sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        return sum(end - start for start, end in self._spans)


def forward_logprobs(model: Model, micro_batches: list[MicroBatch], temperature: float, chunk: int) -> list[Tensor]:
    """Logprob of every token of each micro-batch ([T] float32 on the CPU), on the last pipeline stage; [] elsewhere."""

    def collect(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs, _ = _logprobs(
            logits, micro_batch.targets, temperature, chunk, with_entropy=False, vocab_size=model.vocab_size
        )
        return logits.new_zeros((), dtype=torch.float32), unpack(logprobs, micro_batch)

    with torch.no_grad():
        results = _run(model, micro_batches, collect, forward_only=True)
    return [result.cpu() for result in results]


def forward_backward(
    model: Model, micro_batches: list[MicroBatch], objective: Objective, *, with_entropy: bool
) -> PassMetrics:
    """Accumulate and finalise the gradient of a mini-batch; metrics are filled on the last pipeline stage only.

    Entropy is computed where it is part of the loss or asked for.
    """
    totals: list[Tensor] = []
    peaks: list[Tensor] = []
    names: tuple[list[str], list[str]] = ([], [])
    with_entropy = with_entropy or objective.entropy_coef != 0

    def loss(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
        value, sums, largest = _loss(
            logits, micro_batch.targets, objective, with_entropy=with_entropy, vocab_size=model.vocab_size
        )
        names[0][:], names[1][:] = list(sums), list(largest)
        totals.append(torch.stack(list(sums.values())))
        peaks.append(torch.stack(list(largest.values())))
        return value, None

    timers = ComputeTimers()
    finish_computing()
    started = time.perf_counter()
    if model.balance is not None:
        _count_choices(model, micro_batches, timers)
    _run(model, micro_batches, loss, forward_only=False, timers=timers)
    balance_loss = None if model.balance is None else model.balance.finish()
    finish_computing()
    seconds = time.perf_counter() - started
    busy = timers.seconds()
    if not totals:
        return PassMetrics({}, {}, seconds, busy)
    total, peak = torch.stack(totals).sum(0), torch.stack(peaks).amax(0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=group)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    sums = dict(zip(names[0], total.tolist(), strict=True))
    if balance_loss is not None:
        sums["moe_aux_loss"] = balance_loss
        sums["final_loss"] += balance_loss
    return PassMetrics(sums, dict(zip(names[1], peak.tolist(), strict=True)), seconds, busy)


def _count_choices(model: Model, micro_batches: list[MicroBatch], timers: ComputeTimers) -> None:
    """Let the routers count which experts the mini-batch chooses."""

    def nothing(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
        return logits.new_zeros((), dtype=torch.float32), None

    assert model.balance is not None
    model.balance.begin_counting()
    with torch.no_grad():
        _run(model, micro_batches, nothing, forward_only=True, timers=timers)
    model.balance.begin_training()


def _run(
    model: Model,
    micro_batches: list[MicroBatch],
    on_logits: Callable[[Tensor, MicroBatch], tuple[Tensor, Any]],
    *,
    forward_only: bool,
    timers: ComputeTimers | None = None,
) -> list[Any]:
    """One call of Megatron's schedule; on the last stage it returns what `on_logits` gave beside each loss."""

    def forward_step(
        batches: Iterator[MicroBatch], chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        micro_batch = next(batches)
        if model.balance is not None:
            model.balance.enter_micro_batch(micro_batch.is_token)
        output = chunk(
            input_ids=micro_batch.token_ids,
            position_ids=micro_batch.position_ids,
            attention_mask=None,
            packed_seq_params=micro_batch.packed,
            **keep_dtype,
        )

        def finish(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, result = on_logits(logits[0], micro_batch)
            return value, torch.tensor(0, dtype=torch.int), result

        return output, finish

    # Megatron's half-precision wrapper would copy the logits to float32; `_logprobs` does so a piece at a time.
    keep_dtype = {"fp32_output": False} if model.dtype == torch.bfloat16 else {}
    if model.lora is not None:
        model.lora.switch.dropping = not forward_only
    model.bridge.config.timers = timers  # None too: what a forward-only pass computes is no part of the next update.
    chunks = model.chunks
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        # Read only where lengths are fixed; with variable_seq_lengths each message has a shape of its own.
        seq_length=int(micro_batches[0].token_ids.shape[1]),
        micro_batch_size=1,
        forward_only=forward_only,
        **between_stages(model.bridge.config, micro_batches, len(chunks)),
    )
    forget_messages(chunks)
    return results


def _logprobs(
    logits: Tensor, targets: Targets, temperature: float, chunk: int, *, with_entropy: bool, vocab_size: int
) -> tuple[Tensor, Tensor]:
    return vocab_parallel_logprobs(
        logits,
        targets.labels,
        parallel_state.get_tensor_model_parallel_group(),
        temperature=temperature,
        chunk=chunk,
        with_entropy=with_entropy,
        vocab_size=vocab_size,
    )


def _loss(
    logits: Tensor, targets: Targets, objective: Objective, *, with_entropy: bool, vocab_size: int
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss of one micro-batch, and its part of the mini-batch's sums and largest values."""
    logprobs, entropy = _logprobs(
        logits,
        targets,
        objective.temperature,
        objective.logprobs_chunk_size,
        with_entropy=with_entropy,
        vocab_size=vocab_size,
    )
    weights, mask = targets.loss_weights, targets.loss_mask.float()

    def total(values: Tensor) -> Tensor:
        """Over the tokens that the policy wrote; in float64, because standard deviations are made from these sums."""
        return (values.detach() * mask).sum(dtype=torch.float64)

    current = logprobs.detach()
    # Without old logprobs this is the only step of the update (old_logprobs.py), so the current ones are the old ones.
    old = targets.old_logprobs if targets.old_logprobs is not None else current
    terms, clipped = LOSSES[objective.loss](logprobs, old, targets.advantages, objective.settings)
    policy_loss = weighted_sum(terms, weights)
    loss = policy_loss
    difference = (old - targets.rollout_logprobs).abs() * mask
    sums = {
        "tokens": total(mask),
        "policy_loss": policy_loss.detach().double(),
        "clipped": total(clipped),
        "old_kl": total(old - current),
        "rollout_diff": total(difference),
        "rollout_diff_squared": total(difference.double().square()),
    }
    largest = {"rollout_diff": difference.amax()}
    if targets.is_compared is not None:
        sums["compared"] = targets.is_compared.sum(dtype=torch.float64)
        sums["compared_diff"] = difference.masked_fill(~targets.is_compared, 0.0).sum(dtype=torch.float64)
    if with_entropy:
        sums["entropy"] = total(entropy)
    if objective.entropy_coef != 0:
        entropy_loss = -weighted_sum(entropy, weights)
        loss = loss + objective.entropy_coef * entropy_loss
        sums["entropy_loss"] = entropy_loss.detach().double()
    if objective.kl_coef != 0:
        assert targets.ref_logprobs is not None
        kl = KL_ESTIMATORS[objective.kl_estimator](logprobs, targets.ref_logprobs)
        kl_loss = weighted_sum(kl, weights)
        loss = loss + objective.kl_coef * kl_loss
        sums |= {"kl_loss": kl_loss.detach().double(), "kl": total(kl)}
        largest["kl"] = (kl.detach() * mask).amax()
    # A copy, not a view: schedules may scale the returned loss in place.
    sums["final_loss"] = loss.detach().double()
    return loss, sums, largest
