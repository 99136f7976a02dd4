"""Numbers of layers on the pipeline stages that minimise the cost of the costliest stage.

The output layer is on the last stage and costs as much as several layers (3.9 of Qwen3-4B's, 9.9 of Qwen3-0.6B's), and
all stages wait for the slowest in every micro-batch. The quadratic cost of attention is not counted, so with long
samples the output layer is overestimated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


def layers_of_stages(costs: Sequence[float], head: float, ranks: int, chunks: int = 1) -> list[int]:
    """Number of consecutive layers on each stage, at least one; the last also has the output layer.

    Minimises the largest cost of a rank, then the differences between ranks. With several `chunks` per rank (virtual
    stages), stages are the first chunks of all ranks, then the second, ..; the sum over a rank's chunks counts, because
    it runs all of them in every micro-batch. With layers of different cost the result is then only near the optimum,
    because a rank's chunks are not consecutive.

    Args: costs of the layers and of the output layer (`head`), in one unit.
    Raises: ValueError if there are fewer layers than stages.
    """
    if ranks * chunks > len(costs):
        raise ValueError(f"{len(costs)} layers cannot be split into {ranks * chunks} pipeline stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @functools.cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squares, numbers of layers) of `left` ranks from layer `first` on."""
        if left == 1:
            last = before[-1] - before[first] + head
            return last, last**2, (len(costs) - first,)
        found = []
        for end in range(first + chunks, len(costs) - chunks * (left - 1) + 1):
            here = before[end] - before[first]
            greatest, squares, counts = best(end, left - 1)
            found.append((max(here, greatest), here**2 + squares, (end - first, *counts)))
        return min(found)

    of_ranks = best(0, ranks)[2]
    return [count // chunks + (chunk < count % chunks) for chunk in range(chunks) for count in of_ranks]


def megatron_layout(counts: Sequence[int], pipeline_size: int) -> Any:
    """Megatron's description of the layers on each stage (with virtual stages: on each chunk, in model order)."""
    # Imported here, because a forecast without Megatron splits layers too.
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return PipelineParallelLayerLayout(stages, pipeline_size)
