"""Forward-only and forward-backward passes over the micro-batches of a mini-batch, through Megatron's schedules.

`forward_backward_func` is called once per mini-batch with all its micro-batches, so that a pipeline overlaps them.
Losses are plain sums of `term * loss_weights`: with `calculate_per_token_loss` and a token count of 0 neither the
schedule, nor the data-parallel wrapper, nor `finalize_model_grads` scales anything (megatron-core 0.16 and 0.19), so
the gradient is the exact sum over all ranks and micro-batches. Nothing in a pass moves a tensor to the host; metrics
are copied once per mini-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce, Total, partial_sums
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.passes.logprobs import vocab_parallel_logprobs
from skyrl_train.megatron.passes.packing import MicroBatch, Targets, unpack
from skyrl_train.megatron.passes.pipeline import between_stages, forget_messages


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """Metrics of a mini-batch, equal on all ranks of the last pipeline stage; empty on the others."""

    totals: dict[str, Total]
    seconds: float
    busy_seconds: float
    """Time that this rank spent computing, of `seconds`."""


LOGPROB_DIFFERENCE = "logprob_difference"
"""Total of |engine - trainer| over the tokens that are compared; it is not logged."""


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

    Args: with_entropy: also log the entropy.
    """
    sums = MicroBatchSums()

    def loss(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
        value, metrics, tokens = _loss(
            logits, micro_batch.targets, objective, with_entropy=with_entropy, vocab_size=model.vocab_size
        )
        sums.add(metrics, tokens)
        return value, None

    timers = ComputeTimers()
    _finish_computing()
    started = time.perf_counter()
    if model.balance is not None:
        _count_choices(model, micro_batches, timers)
    _run(model, micro_batches, loss, forward_only=False, timers=timers)
    balance_loss = None if model.balance is None else model.balance.finish()
    _finish_computing()
    seconds = time.perf_counter() - started
    totals = sums.totals()
    if totals and balance_loss is not None:
        totals["policy/moe_aux_loss"] = Total(Reduce.STEP_MEAN, (balance_loss, 1.0))
        (final, count) = totals["policy/final_loss"].sums
        totals["policy/final_loss"] = Total(Reduce.STEP_MEAN, (final + balance_loss, count))
    return PassMetrics(totals, seconds, timers.seconds())


def _finish_computing() -> None:
    """Wait until the device has finished the work of this thread's stream; copies on other streams continue."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class MicroBatchSums:
    """Adds up the metrics of micro-batches on the device, and once over the ranks."""

    def __init__(self) -> None:
        self._reduces: dict[str, Reduce] = {}
        self._parts: list[list[Tensor]] = []

    def add(self, metrics: Mapping[str, Metric], tokens: TokenInputs) -> None:
        """Metrics of the same names each time."""
        self._reduces = {name: metric.reduce for name, metric in metrics.items()}
        num_tokens = tokens.per_sample.num_tokens if Reduce.SAMPLE_MEAN in self._reduces.values() else tokens.loss_mask
        self._parts.append([partial_sums(metric, tokens.loss_mask, num_tokens) for metric in metrics.values()])

    def totals(self) -> dict[str, Total]:
        """A collective over the data- and context-parallel ranks; empty where nothing was added."""
        if not self._parts:
            return {}
        is_max = [reduce is Reduce.MAX for reduce in self._reduces.values()]
        sizes = [len(part) for part in self._parts[0]]
        whole = torch.stack([torch.cat(parts) for parts in self._parts])
        largest = torch.repeat_interleave(torch.tensor(is_max), torch.tensor(sizes)).to(whole.device)
        total, peak = whole.sum(0), whole.amax(0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(total, group=group)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        numbers = torch.where(largest, peak, total).tolist()
        found = {}
        for (name, reduce), size in zip(self._reduces.items(), sizes, strict=True):
            own, numbers = numbers[:size], numbers[size:]
            found[name] = Total(reduce, (*own, 1.0) if reduce is Reduce.STEP_MEAN else tuple(own))
        return found


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
) -> tuple[Tensor, dict[str, Metric], TokenInputs]:
    """Loss of one micro-batch, and its part of the mini-batch's metrics."""
    logprobs, entropy = _logprobs(
        logits,
        targets,
        objective.temperature,
        objective.logprobs_chunk_size,
        with_entropy=with_entropy or "entropy" in objective.needs,
        vocab_size=vocab_size,
    )
    signals = dict(targets.signals)
    is_compared = signals.pop("is_compared", None)
    # Without old logprobs this is the only step of the update (old_logprobs.py), so the current ones are the old ones.
    signals.setdefault("old_logprobs", logprobs.detach())
    if "entropy" in objective.needs:
        signals["entropy"] = entropy
    context_parallel = parallel_state.get_context_parallel_world_size() > 1
    group = parallel_state.get_context_parallel_group() if context_parallel else None
    per_sample = PerSample(targets.sample, targets.num_samples, targets.loss_mask, group)
    tokens = TokenInputs(logprobs, targets.loss_mask, per_sample, signals)
    loss, metrics = objective_loss(objective, tokens, targets.loss_weights)
    if with_entropy:
        metrics["policy/policy_entropy"] = Metric(entropy, Reduce.TOKEN_MEAN)
    if is_compared is not None:
        difference = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        metrics[LOGPROB_DIFFERENCE] = Metric(difference, Reduce.TOKEN_MEAN, is_compared)
    return loss, metrics, tokens
