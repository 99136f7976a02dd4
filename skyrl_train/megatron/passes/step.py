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
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce, Total
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.model.output_layer import output_weight
from skyrl_train.megatron.passes.head import Head
from skyrl_train.megatron.passes.logprobs import Softmax
from skyrl_train.megatron.passes.metrics import LOGPROB_DIFFERENCE, MicroBatchSums, PassMetrics
from skyrl_train.megatron.passes.packing import MicroBatch, Packer, Targets, unpack
from skyrl_train.megatron.passes.pipeline import between_stages, forget_messages
from skyrl_train.types import TrainBatch


class ComputeTimers:
    """Timers that Megatron's schedules start and stop around each forward and backward of a micro-batch.

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
        """Busy seconds. Synchronise the device first."""
        if self._on_gpu:
            return sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        return sum(end - start for start, end in self._spans)


def batch_logprobs(model: Model, packer: Packer, batch: TrainBatch, temperature: float) -> Tensor | None:
    """Logprob of every token of the batch [T] float32 (0 for the first token of a sample); None before the last stage.

    A collective over the ranks that hold the model.
    """
    return batch_logprobs_and_entropy(model, packer, batch, temperature, with_entropy=False)[0]


def batch_logprobs_and_entropy(
    model: Model, packer: Packer, batch: TrainBatch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Like `batch_logprobs`, and the entropy of the distribution of every token, [T] each."""

    def values(hidden: Tensor, targets: Targets) -> dict[str, Tensor]:
        head = head_of(model, temperature)
        logprobs, entropy = head.logprobs(hidden, targets.labels[:, None], with_entropy=with_entropy)
        return {"logprobs": logprobs[:, 0]} | ({"entropy": entropy} if with_entropy else {})

    found = _of_tokens(model, packer, batch, values)
    return found.get("logprobs"), found.get("entropy")


def batch_values(model: Model, packer: Packer, batch: TrainBatch) -> Tensor | None:
    """Value of the state before every token of the batch, like `batch_logprobs`."""
    return _of_tokens(model, packer, batch, lambda values, targets: {"values": values[:, 0]}).get("values")


def batch_topk(
    model: Model, packer: Packer, batch: TrainBatch, temperature: float, k: int, num_candidates: int
) -> dict[str, Tensor]:
    """Fields of a teacher: `batch_logprobs` as teacher_logprobs and, with k > 0, its k likeliest tokens.

    Args: num_candidates: vocabulary of the model that learns. Returns: see `MegatronScorer.teacher_logprobs`; {} before
    the last stage.
    """

    def values(hidden: Tensor, targets: Targets) -> dict[str, Tensor]:
        head = head_of(model, temperature)
        if k == 0:
            logprobs, _ = head.logprobs(hidden, targets.labels[:, None], with_entropy=False)
            return {"teacher_logprobs": logprobs[:, 0]}
        fields = head.logprobs_and_topk(hidden, targets.labels, k, num_candidates)
        return dict(zip(("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs"), fields, strict=True))

    return _of_tokens(model, packer, batch, values)


def _of_tokens(
    model: Model, packer: Packer, batch: TrainBatch, at_positions: Callable[[Tensor, Targets], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """[T, ...] on the CPU for each tensor [P / C, ...] of at_positions(output of the last stage, targets); 0 for tokens
    of no micro-batch; {} before the last stage.
    """
    micro_batches = [packer.pack(batch, samples) for mini_batch in batch.mini_batches for samples in mini_batch]

    def collect(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        values = at_positions(output, micro_batch.targets)
        nothing = output.new_zeros((), dtype=torch.float32)
        return nothing, {name: unpack(each, micro_batch) for name, each in values.items()}

    with torch.no_grad():
        results = _run(model, micro_batches, collect, forward_only=True)
    if not results:
        return {}
    tokens = {
        name: torch.zeros((len(batch.token_ids), *values.shape[1:]), dtype=values.dtype)
        for name, values in results[0].items()
    }
    for micro_batch, fields in zip(micro_batches, results, strict=True):
        for name, values in fields.items():
            tokens[name][micro_batch.token_slice] = values.cpu()
    return tokens


def forward_backward(
    model: Model, micro_batches: list[MicroBatch], objective: Objective, *, with_entropy: bool
) -> PassMetrics:
    """Accumulate and finalise the gradient of a mini-batch; metrics are filled on the last pipeline stage only.

    Args: with_entropy: also log the entropy.
    """
    sums = MicroBatchSums()

    def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
        value, metrics, tokens = _loss(model, output, micro_batch.targets, objective, with_entropy=with_entropy)
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
        totals[f"{objective.name}/moe_aux_loss"] = Total(Reduce.STEP_MEAN, (balance_loss, 1.0))
        (final, count) = totals[f"{objective.name}/final_loss"].sums
        totals[f"{objective.name}/final_loss"] = Total(Reduce.STEP_MEAN, (final + balance_loss, count))
    return PassMetrics(totals, seconds, timers.seconds())


def _finish_computing() -> None:
    """Wait until the device has finished the work of this thread's stream; copies on other streams continue."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _count_choices(model: Model, micro_batches: list[MicroBatch], timers: ComputeTimers) -> None:
    """Have the routers count the experts that the mini-batch chooses."""

    def nothing(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
        return output.new_zeros((), dtype=torch.float32), None

    assert model.balance is not None
    model.balance.begin_counting()
    with torch.no_grad():
        _run(model, micro_batches, nothing, forward_only=True, timers=timers)
    model.balance.begin_training()


def _run(
    model: Model,
    micro_batches: list[MicroBatch],
    on_output: Callable[[Tensor, MicroBatch], tuple[Tensor, Any]],
    *,
    forward_only: bool,
    timers: ComputeTimers | None = None,
) -> list[Any]:
    """Run Megatron's schedule once; on the last stage it returns what `on_output` gave beside each loss.

    Args: on_output(output of the last stage, micro_batch): a language model's hidden states (head.py), or a critic's
        values.
    """

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

        def finish(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, result = on_output(output[0], micro_batch)
            return value, torch.tensor(0, dtype=torch.int), result

        return output, finish

    # Megatron's half-precision wrapper would copy the output to float32.
    keep_dtype = {"fp32_output": False} if model.dtype == torch.bfloat16 else {}
    if model.lora is not None:
        model.lora.switch.dropping = not forward_only
    model.bridge.config.timers = timers  # None too: a forward-only pass is not part of the next update's time.
    chunks = model.chunks
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        # Read only if lengths are fixed; with variable_seq_lengths each message has its own shape.
        seq_length=int(micro_batches[0].token_ids.shape[1]),
        micro_batch_size=1,
        forward_only=forward_only,
        **between_stages(model.bridge.config, micro_batches, len(chunks)),
    )
    forget_messages(chunks)
    return results


def head_of(model: Model, temperature: float) -> Head:
    """The head of a language model, on its last stage."""
    softmax = Softmax(parallel_state.get_tensor_model_parallel_group(), model.vocab_size, temperature)
    weight, sequence_parallel = output_weight(model.modules[-1]), model.bridge.config.sequence_parallel
    return Head(softmax, weight, sequence_parallel, model.logprobs_chunk_size, model.recompute_logits)


def _loss(
    model: Model, output: Tensor, targets: Targets, objective: Objective, *, with_entropy: bool
) -> tuple[Tensor, dict[str, Metric], TokenInputs]:
    """Loss of one micro-batch, and its part of the mini-batch's metrics. Args: output: hidden states, or values."""
    is_critic, with_topk = "values" in objective.needs, "topk_logprobs" in objective.needs
    signals = dict(targets.signals)
    is_compared = signals.pop("is_compared", None)
    if is_critic:
        predicted = signals["values"] = output[:, 0]
    else:
        needs_entropy = with_entropy or "entropy" in objective.needs
        ids = [targets.labels[:, None], *([signals.pop("teacher_topk_ids")] if with_topk else [])]
        head = head_of(model, objective.temperature)
        logprobs, entropy = head.logprobs(output, torch.cat(ids, 1), with_entropy=needs_entropy)
        predicted = logprobs[:, 0]
        if with_topk:
            signals["topk_logprobs"] = logprobs[:, 1:]
        if "old_logprobs" not in signals:
            signals["old_logprobs"] = objective.old_logprobs(predicted.detach(), signals)
        if "entropy" in objective.needs:
            signals["entropy"] = entropy
    context_parallel = parallel_state.get_context_parallel_world_size() > 1
    group = parallel_state.get_context_parallel_group() if context_parallel else None
    per_sample = PerSample(targets.sample, targets.num_samples, targets.loss_mask, group)
    tokens = TokenInputs(predicted, targets.loss_mask, per_sample, signals)
    loss, metrics = objective_loss(objective, tokens, targets.loss_weights)
    if with_entropy and not is_critic:
        metrics["policy/policy_entropy"] = Metric(entropy, Reduce.TOKEN_MEAN, targets.loss_mask)
    if is_compared is not None:
        difference = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        metrics[LOGPROB_DIFFERENCE] = Metric(difference, Reduce.TOKEN_MEAN, is_compared)
    return loss, metrics, tokens
