"""Responses of packed samples as rows of a padded matrix, as functions of skyrl_train 0.4 read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Responses:
    """N tokens of responses in [T] (or [P]) and in [b, R]: b responses, each from the left, the longest of R tokens."""

    tokens: Tensor
    """[N] int64: position of each token in the packed tensor."""
    rows: Tensor
    """[N] int64"""
    columns: Tensor
    """[N] int64"""

    @classmethod
    def trained(cls, sample: Tensor, loss_mask: Tensor) -> Responses:
        """From the first to the last token that the policy wrote; samples without one have no row.

        Args: sample [T]: the sample of each token, in order; loss_mask [T].
        """
        place = torch.arange(len(sample), device=sample.device)
        written = loss_mask.nonzero()[:, 0]
        num_samples = int(sample.max()) + 1 if len(sample) else 0
        first = torch.full((num_samples,), len(sample), device=sample.device)
        first = first.scatter_reduce(0, sample[written], written, "amin")
        last = torch.full_like(first, -1).scatter_reduce(0, sample[written], written, "amax")
        tokens = ((place >= first[sample]) & (place <= last[sample])).nonzero()[:, 0]
        row = (last >= 0).cumsum(0) - 1
        return cls(tokens, row[sample[tokens]], tokens - first[sample[tokens]])

    @classmethod
    def all(cls, cu_seqlens: Tensor, counts: Tensor) -> Responses:
        """From the first token that counts to the end of each sample; the last token of one without any.

        Args: cu_seqlens [B + 1]; counts [T] bool.
        """
        lengths = cu_seqlens.diff().long()
        sample = torch.repeat_interleave(lengths)
        last = cu_seqlens[1:].long() - 1
        counting = counts.nonzero()[:, 0]
        first = last.scatter_reduce(0, sample[counting], counting, "amin")
        tokens = (torch.arange(len(sample)) >= first[sample]).nonzero()[:, 0]
        return cls(tokens, sample[tokens], tokens - first[sample[tokens]])

    def padded(self, values: Tensor) -> Tensor:
        """[T] -> [b, R], 0 at padding, with gradient."""
        matrix = values.new_zeros((int(self.rows.max()) + 1, int(self.columns.max()) + 1))
        return matrix.index_put((self.rows, self.columns), values[self.tokens])

    def packed(self, matrix: Tensor, size: int) -> Tensor:
        """[b, R] -> [T], 0 outside of responses, with gradient. Args: size: T."""
        return matrix.new_zeros(size).index_put((self.tokens,), matrix[self.rows, self.columns])
