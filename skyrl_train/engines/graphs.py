"""Sizes of an engine's CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST = 2_048
"""Tokens of the largest graph: the arithmetic of more takes longer than launching their kernels."""
OWN = ("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "speculative_config")
"""Arguments of vLLM that say which graphs are captured, or for which it chooses other sizes."""


def graph_arguments(sequences: int, tokens: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's argument; none if the user's own (`given`) choose the graphs.
    Args: sequences, tokens: the most of a step.
    """
    return {} if any(name in given for name in OWN) else {"cudagraph_capture_sizes": graph_sizes(sequences, tokens)}


def graph_sizes(sequences: int, tokens: int) -> list[int]:
    """Numbers of tokens of a step for which there is a graph; a step takes the smallest that it fits.

    vLLM's own (0.26 to 0.33) end at 512 tokens, or at two for each sequence. Then a step in which a prompt joins 511
    running requests has none, and a small model's GPU waits for Python. Close together up to `sequences`, where every
    step of decoding is; farther apart up to LARGEST, for steps with prompts in them.
    """
    largest = max(sequences, min(tokens, LARGEST))
    decoding = (1, 2, 4, *range(8, 256, 8), *range(256, sequences, 16))
    mixed = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, LARGEST, 256))
    between = (n for n in mixed if sequences < n < largest)
    return sorted({*(n for n in decoding if n < sequences), sequences, *between, largest})
