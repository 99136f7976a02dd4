"""Assign the samples of one mini-batch to data-parallel ranks and micro-batches. Integers and floats only.

A *plan* is plan[rank][micro_batch] = list of samples. Every rank gets the same number M of micro-batches: the smallest
for which one of two heuristics finds a plan whose heaviest rank is close to the mean.

1. Ranks first: samples in order of falling cost, each to the rank with the least work so far, then the same within the
   rank. Ranks and micro-batches come out nearly equal: the last, small samples fill the differences.
2. Micro-batches first, where the token limit leaves too little slack for that: best-fit decreasing over all ranks at
   once, micro-batches assigned to ranks by cost, then swaps between the heaviest rank and the lightest.

No micro-batch is empty unless there are fewer samples than micro-batches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from skyrl_train.batching.limits import MicroBatchLimits

Plan = list[list[list[int]]]

TOLERATED_IMBALANCE = 0.02
"""Excess of the heaviest rank over the best possible. Above it more micro-batches are tried, as long as none is empty:
where the token limit leaves no slack, one more per rank reduced 30 % of imbalance to 2 %."""
MOST_EXTRA_MICRO_BATCHES = 2
"""Multiple of the smallest number that the token limit allows."""
NEGLIGIBLE_IMBALANCE = 0.005
MAX_SWAPS_PER_RANK = 16
SWAP_NEIGHBOURS = 4
"""Partners of nearly the wanted cost tried for each sample: the nearest one often does not fit."""


def distribute(lengths: Sequence[int], limits: MicroBatchLimits) -> Plan:
    """plan[rank][micro_batch] = indices into `lengths`, micro-batches in the order in which the pipeline runs them.

    Args: lengths [B] of the samples of one mini-batch, in tokens, unpadded.
    """
    sizes = [limits.padded(length) for length in lengths]
    costs = [limits.cost(length) for length in lengths]
    # No plan is better than equal ranks, or than a rank with the longest sample alone.
    floor = max(sum(costs) / limits.dp_size, *costs)
    fewest = num_micro_batches = fewest_micro_batches(sizes, limits)
    most = min(MOST_EXTRA_MICRO_BATCHES * fewest, len(lengths) // limits.dp_size)
    best: Plan | None = None
    best_excess = float("inf")
    # The token limit is met at the latest when every sample has its own micro-batch.
    while best is None or (best_excess > TOLERATED_IMBALANCE and num_micro_batches <= most):
        plan = _ranks_first(sizes, costs, num_micro_batches, limits)
        if plan is None:
            plan = _micro_batches_first(sizes, costs, num_micro_batches, limits)
        if plan is not None:
            excess = max(sum(costs[i] for samples in rank for i in samples) for rank in plan) / floor - 1
            if excess < best_excess:
                best, best_excess = plan, excess
        num_micro_batches += limits.micro_batch_multiple
    return [_small_at_both_ends(rank, costs) for rank in best]


def fewest_micro_batches(sizes: Sequence[int], limits: MicroBatchLimits) -> int:
    """Lower bound of M: the token limit's or, if higher and without empty micro-batches, `min_micro_batches`.

    Args: sizes: padded tokens of each sample.
    """
    limit, multiple = limits.max_tokens, limits.micro_batch_multiple
    lone = sum(size > limit for size in sizes)
    over_half = sum(limit < 2 * size <= 2 * limit for size in sizes)
    rest = sum(size for size in sizes if size <= limit)
    by_tokens = -(-(lone + max(over_half, -(-rest // limit))) // limits.dp_size)
    without_empty = len(sizes) // limits.dp_size // multiple * multiple
    wished = min(limits.min_micro_batches, without_empty)
    return -(-max(by_tokens, wished, 1) // multiple) * multiple


def _ranks_first(
    sizes: Sequence[int], costs: Sequence[float], num_micro_batches: int, limits: MicroBatchLimits
) -> Plan | None:
    """Balance ranks by cost, then the micro-batches of each; None if the token limit does not allow it."""
    limit = limits.max_tokens
    # A sample over the limit fills a micro-batch.
    footprints = [min(size, limit) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda i: (-costs[i], i))
    ranks = _to_least_loaded(
        order, footprints, costs, num_bins=limits.dp_size, room=num_micro_batches * limit, units=num_micro_batches
    )
    if ranks is None:
        return None
    plan = []
    for samples in ranks:
        micro_batches = _to_least_loaded(samples, footprints, costs, num_bins=num_micro_batches, room=limit, units=1)
        if micro_batches is None:
            micro_batches = _best_fit(samples, footprints, num_micro_batches, limit)
        if micro_batches is None:
            return None
        plan.append(micro_batches)
    return plan


def _to_least_loaded(
    order: Sequence[int], footprints: Sequence[int], costs: Sequence[float], *, num_bins: int, room: int, units: int
) -> list[list[int]] | None:
    """Put each sample, in order of falling footprint, into the bin with the least cost that has room for it.

    A bin holds `units` micro-batches: it gets at least as many samples if there are enough for all bins, else at most
    as many. None if a sample does not fit.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free = [room] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    # Bins too full for the current samples, fullest last; they return as samples get smaller.
    parked: list[tuple[int, float, int]] = []
    enough = len(order) >= num_bins * units
    missing = num_bins * units
    for position, i in enumerate(order):
        while parked and -parked[0][0] >= footprints[i]:
            _, load, b = heapq.heappop(parked)
            heapq.heappush(heap, (load, b))
        # Once true it stays true, so a bin that has its units may be dropped.
        only_missing = not enough or len(order) - position <= missing
        while heap:
            load, b = heapq.heappop(heap)
            if only_missing and len(bins[b]) >= units:
                continue
            if footprints[i] <= free[b]:
                break
            heapq.heappush(parked, (-free[b], load, b))
        else:
            return None
        missing -= len(bins[b]) < units
        bins[b].append(i)
        free[b] -= footprints[i]
        heapq.heappush(heap, (load + costs[i], b))
    return bins


def _best_fit(samples: Sequence[int], footprints: Sequence[int], num_bins: int, room: int) -> list[list[int]] | None:
    """Best-fit decreasing into `num_bins` micro-batches, none left empty if there are samples for all; None if full."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for i in sorted(samples, key=lambda i: (-footprints[i], i)):
        at = bisect_left(free, (footprints[i], -1))
        if at < len(free):
            left, b = free.pop(at)
        elif len(bins) < num_bins:
            left, b = room, len(bins)
            bins.append([])
        else:
            return None
        bins[b].append(i)
        insort(free, (left - footprints[i], b))
    bins += [[] for _ in range(num_bins - len(bins))]
    return _without_empty(bins)


def _without_empty(bins: list[list[int]]) -> list[list[int]]:
    """Move the last (smallest) sample of the fullest bins into the empty ones, while a bin has two."""
    for empty in (b for b in bins if not b):
        fullest = max(bins, key=len)
        if len(fullest) > 1:
            empty.append(fullest.pop())
    return bins


def _micro_batches_first(
    sizes: Sequence[int], costs: Sequence[float], num_micro_batches: int, limits: MicroBatchLimits
) -> Plan | None:
    """Fill micro-batches, assign them to ranks by cost, and swap samples until the ranks are even."""
    footprints = [min(size, limits.max_tokens) for size in sizes]
    bins = _best_fit(range(len(sizes)), footprints, limits.dp_size * num_micro_batches, limits.max_tokens)
    if bins is None:
        return None
    work = [sum(costs[i] for i in samples) for samples in bins]
    order = sorted(range(len(bins)), key=lambda b: (-work[b], b))
    # Each micro-batch is one unit of a rank that takes exactly num_micro_batches of them.
    ranks = _to_least_loaded(
        order, [1] * len(bins), work, num_bins=limits.dp_size, room=num_micro_batches, units=num_micro_batches
    )
    assert ranks is not None, "as many micro-batches were packed as the ranks take"
    plan = [[bins[b] for b in rank] for rank in ranks]
    _even_out(plan, footprints, costs, limits.max_tokens)
    return plan


def _even_out(plan: Plan, footprints: Sequence[int], costs: Sequence[float], room: int) -> None:
    """Swap a sample of the heaviest rank with one of the lightest while that brings the two closer."""
    loads = [sum(costs[i] for samples in rank for i in samples) for rank in plan]
    enough = NEGLIGIBLE_IMBALANCE * sum(loads) / len(loads)
    for _ in range(MAX_SWAPS_PER_RANK * len(plan)):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        swap = _best_swap(plan[heavy], plan[light], footprints, costs, room, gap) if gap > enough else None
        if swap is None:
            return
        (k, i), (m, j) = swap
        plan[heavy][k][plan[heavy][k].index(i)] = j
        plan[light][m][plan[light][m].index(j)] = i
        loads[heavy] -= costs[i] - costs[j]
        loads[light] += costs[i] - costs[j]


def _best_swap(
    heavy: list[list[int]],
    light: list[list[int]],
    footprints: Sequence[int],
    costs: Sequence[float],
    room: int,
    gap: float,
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """((micro_batch, sample) of heavy, that of light) whose exchange moves closest to half of the gap."""
    free = [room - sum(footprints[j] for j in samples) for samples in light]
    candidates = sorted((costs[j], m, j) for m, samples in enumerate(light) for j in samples)
    best, best_error = None, gap / 2 * 0.99
    for k, samples in enumerate(heavy):
        for i in samples:
            # The partner costs less, so it is no longer, and heavy has room for it.
            at = bisect_left(candidates, (costs[i] - gap / 2, -1, -1))
            for cost, m, j in candidates[max(at - SWAP_NEIGHBOURS, 0) : at + SWAP_NEIGHBOURS]:
                error = abs(costs[i] - cost - gap / 2)
                if error < best_error and footprints[i] - footprints[j] <= free[m]:
                    best, best_error = ((k, i), (m, j)), error
    return best


def _small_at_both_ends(rank: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Light micro-batches first and last: stages wait for them while the pipeline fills and drains.

    Ordering every rank alike also aligns micro-batches of similar cost for the exchanges of expert parallelism.
    """
    order = sorted(rank, key=lambda samples: sum(costs[i] for i in samples))
    return order[::2] + order[1::2][::-1]
