"""Which layers a pipeline stage holds: as many as make the costliest stage as cheap as can be.

The output layer lies on the last stage and costs as much as several layers (3.9 of Qwen3-4B's, 9.9 of Qwen3-0.6B's),
and all stages wait for the slowest in every micro-batch. Attention between tokens is left out, which grows with their
number: with long samples the output layer weighs less than it is taken for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


def layers_of_stages(costs: Sequence[float], head: float, ranks: int, chunks: int = 1) -> list[int]:
    """Number of consecutive layers on each stage, at least one; the last has the output layer beside.

    With several `chunks` of a rank (virtual stages) stages are those of the first chunks of all ranks, then those of
    the second, .. A rank works off all of its chunks in every micro-batch, so the sum over them counts. With layers of
    unlike cost it is near the best only, for their chunks are not consecutive.

    `costs` are those of the layers, `head` of the output layer, all in one unit. Minimises the greatest sum of a rank;
    of what is left open, ranks are made alike.

    Raises: ValueError if there are fewer layers than stages.
    """
    if ranks * chunks > len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {ranks * chunks} pipeline stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @functools.cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Greatest cost, sum of squares, and layers of `left` ranks that begin with layer `first`."""
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


def megatron_layout(counts: Sequence[int], pipeline_size: int) -> PipelineParallelLayerLayout:
    """Megatron's form of the layers on each stage (with virtual stages: of each of their chunks, in model order)."""
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return PipelineParallelLayerLayout(stages, pipeline_size)
