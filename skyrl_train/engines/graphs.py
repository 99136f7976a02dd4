"""Sizes of an engine's CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST = 1_024
"""Tokens of the largest graph for prompts and decoding together. FlashAttention's workspace grows with it, which vLLM
(0.26) does not count: 128 bytes per token, query head and dimension of a head.
"""
OWN = (
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "performance_mode"),
    *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
)
"""Arguments of vLLM that choose sizes, or with which it needs others."""


def graph_arguments(sequences: int, tokens: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's argument; none if the user's own choose the graphs.
    Args: sequences, tokens: maximum per step; given: the user's arguments.
    """
    return {} if any(name in given for name in OWN) else {"cudagraph_capture_sizes": graph_sizes(sequences, tokens)}


def graph_sizes(sequences: int, tokens: int) -> list[int]:
    """Numbers of tokens for which there is a graph; a step uses the smallest graph that holds it.

    vLLM's own (0.26 to 0.33) end at two tokens per sequence, or 512 (1,024 on Blackwell in later versions). A step in
    which a prompt joins 511 running requests then has none, and a small model's GPU waits for Python. Sizes are dense
    up to `sequences`, for decoding, and sparser up to LARGEST, for steps with prompts.
    """
    largest = max(sequences, min(tokens, LARGEST))
    decoding = (1, 2, 4, *range(8, 256, 8), *range(256, sequences, 16))
    mixed = (n for n in range(64, LARGEST, 64) if sequences < n < largest)
    return sorted({*(n for n in decoding if n < sequences), sequences, *mixed, largest})
