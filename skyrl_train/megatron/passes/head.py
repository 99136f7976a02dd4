"""The output layer and the logprobs behind it in one, in pieces of positions, so that no pass holds all logits.

Forward computes the logits of one piece after the other and keeps a few numbers per position, and in a pass with
backward those logits for which memory is free (`recompute_logits`). Backward computes the others again, overwrites the
logits of each piece by their gradient and adds that to the gradients of hidden states and weight. Kept or computed
again, the logits are the same and so is everything that follows from them, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import gib
from skyrl_train.megatron.layers.weight_gradient import WeightGradient
from skyrl_train.megatron.passes.logprobs import (
    Softmax,
    Tokens,
    Upstream,
    has_kernel,
    joined,
    replace_by_gradient,
    statistics,
)
from skyrl_train.megatron.passes.pieces import FREE_SHARE, PIECE_BYTES
from skyrl_train.megatron.passes.topk import topk

ROWS_MULTIPLE = 256
"""Positions of a piece are a multiple of this where there are as many: tiles of a GPU's matrix product are full."""
_printed: set[str] = set()


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer of the last stage and the distribution that it gives.

    Hidden states are [S, H]: those of all N positions, or with sequence parallelism [N / tp, H] of this rank's.
    """

    softmax: Softmax
    weight: Tensor
    """[V / tp, H]"""
    sequence_parallel: bool
    chunk: int | None
    """Positions of a piece; None: as many as fit into PIECE_BYTES."""
    recompute: bool | None
    """Whether backward computes logits again; None: those for which no memory is free."""

    def logprobs(self, hidden: Tensor, ids: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs [N, k] float32 of the tokens `ids` [N, k] and entropy [N] float32 in nats of each position (0 and
        without gradient unless with_entropy), the same on every rank of the tensor-parallel group.
        """
        hidden = self._whole(hidden)
        return _HeadLogprobs.apply(hidden, self.weight, ids, self, with_entropy, torch.is_grad_enabled())

    @torch.no_grad()
    def logprobs_and_topk(
        self, hidden: Tensor, labels: Tensor, k: int, num_candidates: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logprob [N] of each label; ids [N, k] int32 and logprobs [N, k] of the likeliest tokens (topk.py)."""
        hidden = self._whole(hidden)
        tokens = Tokens.of(labels[:, None], len(self.weight), self.softmax)
        pieces = [self._piece_topk(hidden[span], tokens[span], k, num_candidates) for span in self.spans(hidden, 1)]
        logprobs, ids, best = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return logprobs[:, 0], ids, best

    def _piece_topk(self, hidden: Tensor, tokens: Tokens, k: int, num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.t()
        parts = statistics(logits, tokens, self.softmax, with_entropy=False)
        logprobs, _, log_z = joined(parts, tokens, self.softmax, with_entropy=False)
        return logprobs, *topk(logits, k, log_z, self.softmax, num_candidates)

    def _whole(self, hidden: Tensor) -> Tensor:
        """Hidden states of all positions. Each rank has the gradient of its part of the vocabulary: they are summed."""
        if self.softmax.group.size() == 1:
            return hidden
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return mappings.copy_to_tensor_model_parallel_region(hidden)

    def spans(self, hidden: Tensor, k: int) -> Iterator[slice]:
        """Positions of each piece. Every pass over the same positions has the same pieces, and so the same rounding."""
        # Beside the logits: x and exp(x) in torch's float32.
        copies = 0 if has_kernel(hidden, k) else 2 * 4
        rows = self.chunk or max(1, PIECE_BYTES // (len(self.weight) * (hidden.element_size() + copies)))
        if self.chunk is None and rows > ROWS_MULTIPLE:
            rows -= rows % ROWS_MULTIPLE
        return (slice(start, min(start + rows, len(hidden))) for start in range(0, len(hidden), rows))

    def num_kept(self, hidden: Tensor, spans: list[slice]) -> int:
        """Number of pieces, the first ones, whose logits stay on the device until backward."""
        if self.recompute is not None or not spans:
            return 0 if self.recompute else len(spans)
        memory = memory_in_use()
        free = memory["free"] + memory["reserved"] - memory["allocated"]
        # A piece that is not kept and the gradient of the hidden states need memory too.
        room = free - FREE_SHARE * memory["total"] - PIECE_BYTES - hidden.nbytes
        size = len(self.weight) * hidden.element_size()
        num = sum(span.stop * size <= room for span in spans)
        if len(spans) > 1 and self.softmax.group.rank() == 0:
            logits = f"logits of {len(hidden)} tokens take {gib(len(hidden) * size)} GiB, {gib(free)} GiB are free"
            _print_choice(num, len(spans), logits)
        return num


def _print_choice(num_kept: int, num: int, logits: str) -> None:
    """Print the first micro-batch of each outcome, on one data-parallel rank."""
    outcome = "all" if num_kept == num else "some" if num_kept else "none"
    if outcome in _printed or parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0:
        return
    _printed.add(outcome)
    choice = "all are kept" if outcome == "all" else f"{num_kept} of {num} pieces are kept, the others computed again"
    print(f"recompute_logits: {logits}; {choice} in the backward pass", flush=True)


class _HeadLogprobs(torch.autograd.Function):
    """`Head.logprobs` of the hidden states of all positions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, head: Head, with_entropy: bool, with_backward: bool
    ) -> tuple[Tensor, Tensor]:
        softmax = head.softmax
        kept: list[Tensor | None] = []
        tokens = Tokens.of(ids, len(weight), softmax)
        parts = hidden.new_empty(3 + ids.shape[1], len(ids), dtype=torch.float32)
        spans = list(head.spans(hidden, ids.shape[1]))
        num_kept = head.num_kept(hidden, spans) if with_backward else 0
        for span in spans:
            logits = hidden[span] @ weight.t()
            parts[:, span] = statistics(logits, tokens[span], softmax, with_entropy=with_entropy)
            if len(kept) < num_kept:
                kept.append(logits)
            del logits  # before the next piece is allocated
        logprobs, entropy, log_z = joined(parts, tokens, softmax, with_entropy=with_entropy)
        ctx.save_for_backward(hidden, tokens.local, log_z, entropy)
        # Not with save_for_backward, which would check the version of the weight, and keep the logits beyond their use.
        ctx.weight, ctx.head, ctx.with_entropy, ctx.spans, ctx.kept = weight, head, with_entropy, spans, kept
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, local, log_z, entropy = ctx.saved_tensors
        weight, softmax, kept = ctx.weight, ctx.head.softmax, ctx.kept
        tokens = Tokens(local, softmax.columns(len(weight))[1])
        # The gradient of a sum is expanded: it has stride 0.
        up = Upstream(log_z, entropy, grad_logprobs, grad_entropy.contiguous() if ctx.with_entropy else None)
        grad_hidden = torch.empty_like(hidden)
        total = _gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        for index, span in enumerate(ctx.spans):
            logits = kept[index] if index < len(kept) else hidden[span] @ weight.t()
            replace_by_gradient(logits, tokens[span], softmax, up[span])
            torch.mm(logits, weight, out=grad_hidden[span])
            if total is not None:
                WeightGradient.wgrad_gemm_accum_fp32(hidden[span], logits, total)
            if index < len(kept):
                kept[index] = None
            del logits
        return grad_hidden, None if total is None else _weight_gradient(weight, total), None, None, None, None


def _gradient_buffer(weight: Tensor) -> Tensor:
    """[V / tp, H] float32 to add the gradient to: Megatron's, in its data-parallel wrapper."""
    if hasattr(weight, "grad_added_to_main_grad"):
        return weight.main_grad  # type: ignore[attr-defined,no-any-return]
    return torch.zeros_like(weight, dtype=torch.float32)


def _weight_gradient(weight: Tensor, total: Tensor) -> Tensor:
    """The gradient for autograd; a stand-in if Megatron's buffer has it already."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return total.to(weight.dtype)
    weight.grad_added_to_main_grad = True
    # The wrapper's hook runs for a parameter that gets a gradient, and drops it unread, but for a tied embedding, to
    # whose gradient autograd adds it first.
    is_added = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_added else torch.empty_like(weight)
