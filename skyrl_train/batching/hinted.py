"""TrainBatches with the teacher's prompts in place of the policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.pack import distribute
from skyrl_train.types import TeacherPrompt, TrainBatch


@dataclass(frozen=True, slots=True)
class HintedBatch(TrainBatch):
    """The samples of a policy's TrainBatch after other prompts, in the same order and in separate micro-batches."""

    source: Tensor = field(kw_only=True)
    """int64, one per token of the policy's batch: index of the same token in this batch, -1 for prompt tokens."""


def with_prompts(
    batches: Sequence[TrainBatch], prompts: Sequence[TeacherPrompt], limits: MicroBatchLimits
) -> list[HintedBatch]:
    """Replace the prompt of every sample; every shard keeps its samples.

    Args: prompts: of each sample of the step; limits: of the policy's micro-batches.
    Raises: ValueError for a sample that becomes longer than the model accepts.
    """
    hinted = [_hinted(batch, prompts, limits) for batch in batches]
    # Ranks of different shards may share experts: they must run equally many micro-batches.
    number = max(len(batch.mini_batches[0]) for batch in hinted)
    return [
        replace(batch, mini_batches=((*batch.mini_batches[0], *[()] * (number - len(batch.mini_batches[0]))),))
        for batch in hinted
    ]


def aligned(fields: Mapping[str, Tensor], batch: TrainBatch) -> dict[str, Tensor]:
    """Values of the batch's tokens [T, ...] -> of the policy's batch; 0 for the tokens of its prompts."""
    if not isinstance(batch, HintedBatch):
        return dict(fields)
    is_scored = batch.source >= 0
    found = {}
    for name, values in fields.items():
        found[name] = values.new_zeros((len(batch.source), *values.shape[1:]))
        found[name][is_scored] = values[batch.source[is_scored]]
    return found


def _hinted(batch: TrainBatch, prompts: Sequence[TeacherPrompt], limits: MicroBatchLimits) -> HintedBatch:
    tokens, masks, sources, lengths = [batch.token_ids[:0]], [batch.loss_mask[:0]], [batch.token_ids[:0]], []
    bounds, position = batch.cu_seqlens.tolist(), 0
    for index, sample in enumerate(batch.sample_ids.tolist()):
        prompt, start, end = prompts[sample], bounds[index], bounds[index + 1]
        response = slice(start + prompt.length, end)
        first = position + len(prompt.token_ids)
        position = first + end - start - prompt.length
        lengths.append(len(prompt.token_ids) + end - start - prompt.length)
        tokens += [prompt.token_ids, batch.token_ids[response]]
        masks += [torch.zeros(len(prompt.token_ids), dtype=torch.bool), batch.loss_mask[response]]
        sources += [torch.full((prompt.length,), -1), torch.arange(first, position)]
    if lengths and max(lengths) > limits.max_sample_tokens:
        raise ValueError(
            f"a sample has {max(lengths)} tokens with its hint: more than the {limits.max_sample_tokens} positions of "
            "the model. Shorten trainer.algorithm.distillation.distillation_hint, or lower max_generate_length"
        )
    (plan,) = distribute(lengths, replace(limits, dp_size=1)) if lengths else ([()],)
    return HintedBatch(
        token_ids=torch.cat(tokens),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        loss_mask=torch.cat(masks),
        loss_weights={},
        signals={},
        sample_ids=batch.sample_ids,
        mini_batches=(tuple(tuple(samples) for samples in plan),),
        step_id=batch.step_id,
        source=torch.cat(sources),
    )
