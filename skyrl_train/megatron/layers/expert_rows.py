"""Which rows belong to which of the local experts.

Ranks that exchange no tokens count them on the device alone, and the host never waits for the counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class ExpertRows:
    """Numbers of rows of the experts, in batches that are ordered by expert."""

    def __init__(self, counts: Sequence[int] | Tensor) -> None:
        """Args: counts [E] of the host, or of a device."""
        self._counts = counts
        self._ends: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def tolist(self) -> ExpertRows:
        """Megatron's experts ask for a list, which they hand to their linear layers."""
        return self

    @functools.cached_property
    def _starts(self) -> list[int]:
        counts = self._counts
        return [0, *accumulate(counts.tolist() if isinstance(counts, Tensor) else counts)]

    def check(self, x: Tensor) -> None:
        """Raises: AssertionError if x [T, ...] has another number of rows; counts on a device are not checked."""
        if not isinstance(self._counts, Tensor):
            assert self._starts[-1] == len(x), f"{self._starts[-1]} tokens of experts, {len(x)} rows"

    def of(self, x: Tensor, first: int, num: int) -> Tensor:
        """Rows of `num` experts from expert `first` on."""
        return x if num == len(self) else x[self._starts[first] : self._starts[first + num]]

    def ends(self, device: torch.device, first: int, num: int) -> Tensor:
        """[num] int32 on the device: end of each expert's rows, counted from the first expert's."""
        if (first, num) not in self._ends:
            self._ends[first, num] = self._computed_ends(device, first, num)
        return self._ends[first, num]

    def _computed_ends(self, device: torch.device, first: int, num: int) -> Tensor:
        if isinstance(self._counts, Tensor) and num == len(self):
            return self._counts.cumsum(0, dtype=torch.int32)
        origin = self._starts[first]
        values = [end - origin for end in self._starts[first + 1 : first + num + 1]]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def clear_without_rows(self, products: Tensor, first: int) -> None:
        """Write zeros into those of products [n, ...], of experts from `first` on, whose experts have no rows."""
        if isinstance(self._counts, Tensor) and len(products) == len(self):
            products.masked_fill_((self._counts == 0)[:, None, None], 0)
            return
        bounds = pairwise(self._starts[first : first + len(products) + 1])
        if empty := [index for index, (start, end) in enumerate(bounds) if start == end]:
            torch._foreach_zero_([products[index] for index in empty])
