"""TrainBatch -> packed micro-batches on the device.

Samples are laid end to end, each padded to the multiple that tensor and context parallelism need. All inputs of the
loss are moved to the *predicting* position: entry p of a `[P]` tensor belongs to the token at p + 1 of the same sample.
So no label is shifted after the context-parallel split, and the last position of a sample weighs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.device import device
from skyrl_train.megatron.layers.attention import PackedSamples, pack_params
from skyrl_train.megatron.layers.pack_tables import zigzag
from skyrl_train.ranks import pad_multiple
from skyrl_train.types import TrainBatch


@dataclass(frozen=True, slots=True)
class Targets:
    """Inputs of the loss at each predicting position, [P / C] each (P padded tokens, C context-parallel ranks)."""

    labels: Tensor
    """int64: the token to predict, 0 if there is none."""
    loss_mask: Tensor
    """bool: the policy wrote that token."""
    loss_weights: Mapping[str, Tensor]
    """float32: weight in the mini-batch's loss under each reduction."""
    sample: Tensor
    """int64: index of the position's sample in the micro-batch, padding included."""
    num_samples: int
    signals: Mapping[str, Tensor]
    """Fields of `TokenInputs`, and `is_compared`: whether the engine's logprob must equal the trainer's. Without
    old_logprobs this forward pass yields them."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The local context-parallel part of the samples of one forward pass, on the device."""

    token_ids: Tensor
    """[1, P / C] int64"""
    position_ids: Tensor
    """[1, P / C] int64, from 0 within each sample."""
    is_token: Tensor
    """[P / C] bool: False at padding."""
    targets: Targets
    packed: PackedSamples
    token_slice: Tensor
    """[T] int64: index in the TrainBatch of each token of the micro-batch, over all context-parallel ranks."""
    source: Tensor
    """[T] int64: predicting position in [P] of each token; P for the first of a sample, which is not predicted."""
    local: Tensor | None
    """[P / C] int64: positions of [P] that this context-parallel rank holds; None means all."""


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs samples for one parallel layout."""

    multiple: int
    """Samples are padded to a multiple of this many tokens."""
    cp_rank: int
    cp_size: int
    device: torch.device

    @classmethod
    def of_layout(cls, *, sequence_parallel: bool) -> Packer:
        """The packer for this process's device and Megatron groups."""
        tp, cp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
        return cls(
            multiple=pad_multiple(tp if sequence_parallel else 1, cp),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=cp,
            device=device(),
        )

    def pack(
        self, batch: TrainBatch, samples: tuple[int, ...], signals: Mapping[str, Tensor] | None = None
    ) -> MicroBatch:
        """Pack `samples` of the batch; without samples, one sample of padding.

        Args: signals [T] or [T, k] of the whole batch, besides its own.
        """
        chosen = torch.tensor(samples, dtype=torch.int64)
        starts = batch.cu_seqlens[:-1].long()[chosen]
        lengths = batch.cu_seqlens.diff().long()[chosen]
        padded = (lengths + self.multiple - 1) // self.multiple * self.multiple
        if not samples:
            padded = torch.tensor([self.multiple])
        within = _ranges(lengths)
        token_slice = torch.repeat_interleave(starts, lengths) + within
        position = torch.repeat_interleave((padded.cumsum(0) - padded)[: len(lengths)], lengths) + within
        size = int(padded.sum())
        source = torch.where(within > 0, position - 1, size)
        tokens = batch.token_ids[token_slice]
        local = zigzag(padded.tolist(), self.cp_rank, self.cp_size) if self.cp_size > 1 else None

        def to_device(whole: Tensor) -> Tensor:
            return (whole if local is None else whole[local]).to(self.device, non_blocking=True)

        def at_predictor(values: Tensor) -> Tensor:
            """[T, ...] -> [P / C, ...]"""
            return to_device(values.new_zeros((size + 1, *values.shape[1:])).index_copy_(0, source, values)[:size])

        def aligned(values: Tensor) -> Tensor:
            return at_predictor(values[token_slice])

        return MicroBatch(
            token_ids=to_device(tokens.new_zeros(size).scatter_(0, position, tokens))[None],
            position_ids=to_device(_ranges(padded))[None],
            is_token=to_device(torch.zeros(size, dtype=torch.bool).index_fill_(0, position, True)),
            targets=Targets(
                labels=at_predictor(tokens),
                loss_mask=aligned(batch.loss_mask),
                loss_weights={name: aligned(values) for name, values in batch.loss_weights.items()},
                sample=to_device(torch.repeat_interleave(padded)),
                num_samples=len(padded),
                signals={name: aligned(values) for name, values in {**batch.signals, **(signals or {})}.items()},
            ),
            packed=pack_params(
                padded.tolist(),
                lengths.tolist() or padded.tolist(),
                self.device,
                cp_rank=self.cp_rank,
                cp_size=self.cp_size,
            ),
            token_slice=token_slice,
            source=source.to(self.device, non_blocking=True),
            local=local,
        )


def _ranges(lengths: Tensor) -> Tensor:
    """0 .. length - 1 for each length, end to end."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(ends - lengths, lengths)


def unpack(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Values at the local predicting positions [P / C, ...] -> of the tokens [T, ...], 0 for each sample's first token.

    A collective over the context-parallel group.
    """
    if micro_batch.local is not None:
        size = len(micro_batch.local) * parallel_state.get_context_parallel_world_size()
        whole = values.new_zeros((size, *values.shape[1:]))
        whole[micro_batch.local.to(values.device)] = values
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        values = whole
    padded = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    return padded[micro_batch.source]
