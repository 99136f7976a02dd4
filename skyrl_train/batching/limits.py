"""Limits on the size and number of micro-batches, and the cost of a sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """How a mini-batch may be split, by the parallel layout and the configuration."""

    dp_size: int
    """Data-parallel ranks."""
    max_tokens: int
    """Padded tokens of one micro-batch (`trainer.max_tokens_per_microbatch`); a longer sample gets its own."""
    max_sample_tokens: int
    """Tokens of the longest sample that the model accepts."""
    pad_multiple: int = 1
    """Each sample is padded to a multiple of this, for the tensor- and context-parallel split."""
    min_micro_batches: int = 1
    """Micro-batches per rank and mini-batch that keep the pipeline full, if there are enough samples."""
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this: the pipeline size under the interleaved schedule."""
    attention_cost_ratio: float = 0.0
    """Cost of a sample of L tokens is L + attention_cost_ratio * L^2 (hf/flops.py)."""

    def padded(self, length: int) -> int:
        """Tokens that a sample of `length` tokens occupies."""
        return -(-length // self.pad_multiple) * self.pad_multiple

    def cost(self, length: int) -> float:
        """Cost of a sample of `length` tokens, in units of one token without attention."""
        tokens = self.padded(length)
        return tokens * (1.0 + self.attention_cost_ratio * tokens)
