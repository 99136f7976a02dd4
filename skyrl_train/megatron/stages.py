"""Which layers a pipeline stage holds: as many as make the costliest stage as cheap as can be.

The output layer lies on the last stage and costs as much as several layers (3.9 of Qwen3-4B's, 9.9 of Qwen3-0.6B's),
and all stages wait for the slowest in every micro-batch. Attention between tokens is left out, which grows with their
number: with long samples the output layer weighs less than it is taken for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


def layers_of_stages(costs: Sequence[float], head: float, stages: int) -> list[int]:
    """Number of consecutive layers on each of `stages` stages, at least one; the last has the output layer beside.

    `costs` are those of the layers, `head` of the output layer, all in one unit. Minimises the greatest sum; of what
    is left open, stages are made alike.

    Raises: ValueError if there are fewer layers than stages.
    """
    if stages > len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} pipeline stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @functools.cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Greatest cost, sum of squares, and layers of `left` stages that begin with layer `first`."""
        if left == 1:
            last = before[-1] - before[first] + head
            return last, last**2, (len(costs) - first,)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            here = before[end] - before[first]
            greatest, squares, counts = best(end, left - 1)
            found.append((max(here, greatest), here**2 + squares, (end - first, *counts)))
        return min(found)

    return list(best(0, stages)[2])


def megatron_layout(counts: Sequence[int], pipeline_size: int) -> PipelineParallelLayerLayout:
    """Megatron's form of the layers on each stage (with virtual stages: of each of their chunks, in model order)."""
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return PipelineParallelLayerLayout(stages, pipeline_size)
