"""TokenBatch -> one TrainBatch per data-parallel rank: mini-batches, loss weights, ranks, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyrl_train.algorithms.reductions import MaxLengths, loss_weights
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.pack import Plan, distribute
from skyrl_train.types import Metrics, TokenBatch, TrainBatch


def split(
    experience: TokenBatch,
    limits: MicroBatchLimits,
    *,
    num_mini_batches: int = 1,
    reductions: Sequence[str] = ("token_mean",),
    max_lengths: MaxLengths = MaxLengths(),  # noqa: B008
    step_id: int = 0,
) -> list[TrainBatch]:
    """Split a step's samples into mini-batches, and each of these into data-parallel ranks and micro-batches.

    Mini-batches have the same number of groups, in the order of the experience. Loss weights are those of the whole
    mini-batch. The result depends on the arguments alone, so every process computes the same one.

    Args: reductions: names of `REDUCTIONS`; max_lengths: for reductions that divide by one.
    Returns: [limits.dp_size]; samples are in the order in which the micro-batches use them.
    Raises: ValueError if the groups cannot be divided, a group is not contiguous, or a sample is too long.
    """
    _check_lengths(experience, limits.max_sample_tokens)
    lengths = experience.lengths.tolist()
    weights: dict[str, list[Tensor]] = {reduction: [] for reduction in reductions}
    plans: list[Plan] = []
    for start, end in mini_batch_bounds(experience.group_ids, num_mini_batches):
        bounds = experience.cu_seqlens[start : end + 1]
        mask = experience.loss_mask[bounds[0] : bounds[-1]]
        group_ids = experience.group_ids[start:end]
        for reduction, parts in weights.items():
            parts.append(loss_weights(reduction, mask, bounds - bounds[0], group_ids, max_lengths))
        plan = distribute(lengths[start:end], limits)
        plans.append([[[start + i for i in samples] for samples in rank] for rank in plan])
    views = {
        "token_ids": torch.split(experience.token_ids, lengths),
        "loss_mask": torch.split(experience.loss_mask, lengths),
    }
    shares = {name: torch.split(torch.cat(parts), lengths) for name, parts in weights.items()}
    signals = {name: torch.split(values, lengths) for name, values in experience.signals.items()}
    batches = []
    for rank in range(limits.dp_size):
        mini_batches = [plan[rank] for plan in plans]
        order = [i for micro_batches in mini_batches for samples in micro_batches for i in samples]
        sample_ids = torch.tensor(order, dtype=torch.int64)
        batches.append(
            TrainBatch(
                **_joined(views, order),
                cu_seqlens=torch.nn.functional.pad(experience.lengths[sample_ids].cumsum(0), (1, 0)).to(torch.int32),
                loss_weights=_joined(shares, order),
                signals=_joined(signals, order),
                sample_ids=sample_ids,
                mini_batches=_renumbered(mini_batches),
                step_id=step_id,
            )
        )
    return batches


def mini_batches_of(num_groups: int, mini_batch_size: int, key: str = "trainer.policy_mini_batch_size") -> int:
    """Number of mini-batches of `mini_batch_size` groups; fewer groups are one smaller mini-batch.

    Raises: ValueError for a number of groups above that which is not a multiple of it.
    """
    if num_groups > mini_batch_size and num_groups % mini_batch_size:
        raise ValueError(
            f"{key} is {mini_batch_size}: {num_groups} groups cannot be split into "
            "mini-batches of this size. Use a multiple of it, or at most that many groups"
        )
    return max(1, num_groups // mini_batch_size)


def mini_batch_bounds(group_ids: Tensor, num_mini_batches: int) -> list[tuple[int, int]]:
    """(first sample, one past the last) of each mini-batch of equally many groups.

    Args: group_ids [B]. Raises: ValueError if that is not possible, or the samples of a group are not neighbours.
    """
    ids, sizes = torch.unique_consecutive(group_ids, return_counts=True)
    if len(ids.unique()) != len(ids):
        raise ValueError("the samples of a group are not contiguous in the experience. Build it with build_experience")
    if num_mini_batches < 1 or len(ids) % num_mini_batches:
        raise ValueError(
            f"{len(ids)} groups cannot be split into {num_mini_batches} mini-batches of equal size. Set "
            "trainer.policy_mini_batch_size to a divisor of the number of groups of the step"
        )
    ends = sizes.cumsum(0)[len(ids) // num_mini_batches - 1 :: len(ids) // num_mini_batches].tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def balance_metrics(batches: Sequence[TrainBatch], limits: MicroBatchLimits) -> Metrics:
    """Balance and fill of a step's micro-batches; the work of a sample is `limits.cost`.

    - `balance/dp_imbalance`: time lost because ranks wait for the heaviest one, heaviest / mean - 1, summed over
      mini-batches (each ends with a wait).
    - `balance/padding_share`: padded tokens that are not tokens, of all padded tokens.
    - `balance/fill`: padded tokens / (micro-batches with samples x max_tokens); over 1 where samples exceed the limit.
    - `balance/num_micro_batches`: per rank, summed over mini-batches. `balance/num_empty_micro_batches`: of all ranks.
    """
    heaviest = mean = 0.0
    num_padded = num_empty = 0
    lengths = [batch.cu_seqlens.diff().tolist() for batch in batches]
    for mini_batch in range(len(batches[0].mini_batches)):
        loads = []
        for batch, length in zip(batches, lengths, strict=True):
            micro_batches = batch.mini_batches[mini_batch]
            num_empty += sum(not samples for samples in micro_batches)
            num_padded += sum(limits.padded(length[i]) for samples in micro_batches for i in samples)
            loads.append(sum(limits.cost(length[i]) for samples in micro_batches for i in samples))
        heaviest += max(loads)
        mean += sum(loads) / len(loads)
    num_micro_batches = sum(len(micro_batches) for micro_batches in batches[0].mini_batches)
    num_filled = num_micro_batches * len(batches) - num_empty
    return {
        "balance/dp_imbalance": heaviest / mean - 1,
        "balance/padding_share": 1 - sum(map(sum, lengths)) / num_padded,
        "balance/fill": num_padded / (num_filled * limits.max_tokens),
        "balance/num_micro_batches": float(num_micro_batches),
        "balance/num_empty_micro_batches": float(num_empty),
    }


def _check_lengths(experience: TokenBatch, max_sample_tokens: int) -> None:
    longest = int(experience.lengths.argmax())
    length = int(experience.lengths[longest])
    if length > max_sample_tokens:
        num_over = int((experience.lengths > max_sample_tokens).sum())
        raise ValueError(
            f"sample {longest} has {length} tokens: {num_over} of {experience.num_samples} samples exceed the model's "
            f"limit of {max_sample_tokens}. Lower generator.max_input_length or "
            "generator.sampling_params.max_generate_length"
        )


def _joined(fields: Mapping[str, Sequence[Tensor]], order: list[int]) -> dict[str, Tensor]:
    """Concatenated [L] views of the samples in `order`, for each field."""
    # Views copied one after the other: 15 ms for 1,024 samples of 2.8 M tokens, against 34 ms by an index per token.
    return {
        name: torch.cat([views[i] for i in order]) if order else views[0].new_empty(0) for name, views in fields.items()
    }


def _renumbered(mini_batches: list[list[list[int]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The nesting of `mini_batches` with samples numbered 0, 1, 2, ... in order."""
    position = 0
    renumbered = []
    for micro_batches in mini_batches:
        row = []
        for samples in micro_batches:
            row.append(tuple(range(position, position + len(samples))))
            position += len(samples)
        renumbered.append(tuple(row))
    return tuple(renumbered)
