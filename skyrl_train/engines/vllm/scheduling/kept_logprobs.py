"""Logprobs of running requests, kept as arrays until they are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.outputs import LogprobsLists

Arrays = Sequence[npt.NDArray[np.generic]]
"""Token ids, logprobs and ranks."""


class StepLogprobs:
    """Logprobs of one engine step, in place of vLLM's `LogprobsLists`, which cuts three arrays for each request."""

    def __init__(self, all_requests: LogprobsLists) -> None:
        self.all_requests = all_requests
        self.is_flat = all_requests.logprobs.shape[1] == 1 and all_requests.cu_num_generated_tokens is None
        """Whether each request has one token, and no logprobs but that token's."""
        self._flat: list[npt.NDArray[np.generic]] | None = None

    @property
    def flat(self) -> list[npt.NDArray[np.generic]]:
        """Token ids, logprobs and ranks, one number for each request, if the step is flat."""
        if self._flat is None:
            self._flat = [array.reshape(-1) for array in self.all_requests[:3]]
        return self._flat

    def slice_request(self, index: int, num_tokens: int) -> Part:
        """Called by vLLM for each request."""
        return Part(self, index, num_tokens)


@dataclass(slots=True)
class Part:
    """A request's logprobs of one step."""

    step: StepLogprobs
    index: int
    num_tokens: int

    def arrays(self) -> Arrays:
        if self.step.is_flat and self.num_tokens == 1:
            token_ids, logprobs, ranks = (array[self.index : self.index + 1] for array in self.step.flat)
            return token_ids[:, None], logprobs[:, None], ranks
        return self.step.all_requests.slice_request(self.index, self.num_tokens)[:3]


class Grid:
    """Logprobs of requests that decode together, a column for each: a row is written at once."""

    ROWS = 16
    """Rows of one allocation."""

    def __init__(self, num_columns: int) -> None:
        self.num_rows, self.num_columns = 0, num_columns
        self._blocks: list[Arrays] = []
        self.open: list[Column | None] = [None] * num_columns
        """What each column's next row belongs to."""
        self.is_open = np.zeros(num_columns, bool)
        """Whether it belongs to something: the same as an array, for all columns at once."""

    def add(self, columns: npt.NDArray[np.intp], values: Arrays) -> None:
        """Write a row. Args: values: of these columns."""
        row = self.num_rows % self.ROWS
        if row == 0:
            self._blocks.append([np.empty((self.ROWS, self.num_columns), each.dtype) for each in values])
        for block, of_step in zip(self._blocks[-1], values, strict=True):
            block[row, columns] = of_step
        self.num_rows += 1

    def begin(self, column: int) -> Column:
        """A column's rows from the next one on."""
        self.is_open[column] = True
        begun = self.open[column] = Column(self, column, self.num_rows)
        return begun

    def end(self, column: int) -> None:
        if (begun := self.open[column]) is not None:
            begun.stop, self.open[column], self.is_open[column] = self.num_rows, None, False

    def rows(self, column: int, start: int, stop: int) -> Arrays:
        first = start // self.ROWS
        blocks = self._blocks[first : -(-stop // self.ROWS)]
        kept = slice(start - first * self.ROWS, stop - first * self.ROWS)
        token_ids, logprobs, ranks = (np.concatenate([block[n][:, column] for block in blocks])[kept] for n in range(3))
        return token_ids[:, None], logprobs[:, None], ranks


@dataclass(slots=True)
class Column:
    """A request's logprobs of several steps: rows of one column."""

    grid: Grid
    index: int
    start: int
    stop: int | None = None
    """None: all rows that the grid has."""

    def arrays(self) -> Arrays | None:
        stop = self.grid.num_rows if self.stop is None else self.stop
        return self.grid.rows(self.index, self.start, stop) if stop > self.start else None


class KeptLogprobs:
    """Logprobs of each running request for the tokens that it has, in their order."""

    def __init__(self, may_wait: Callable[[str], bool]) -> None:
        """Args: may_wait: whether the logprobs of a request may be kept until it ends."""
        self.may_wait = may_wait
        self._parts: dict[str, list[Part | Column]] = defaultdict(list)

    def keep(self, request_id: str, part: Part | Column) -> None:
        self._parts[request_id].append(part)

    def kept_or_joined(self, request_id: str, part: Part) -> LogprobsLists | None:
        """Keep a part, or return what is to be sent now."""
        if request_id not in self._parts and not self.may_wait(request_id):
            return joined([part])
        self.keep(request_id, part)
        return None

    def drop(self, request_id: str) -> None:
        self._parts.pop(request_id, None)

    def take(self, request_id: str, last: Part | None = None) -> LogprobsLists | None:
        """Remove and return what is kept of a request, with the last one."""
        parts = self._parts.pop(request_id, []) + ([] if last is None else [last])
        return joined(parts)


def joined(parts: Sequence[Part | Column]) -> LogprobsLists | None:
    """What vLLM's slices of these parts are, one after another, with the columns that all of them have: a step has as
    many as the request of its batch that asks for most, and vLLM's front end reads those that its request asked for.

    Returns: None for no token.
    """
    arrays = [each for part in parts if (each := part.arrays()) is not None]
    if not arrays:
        return None
    width = min(logprobs.shape[1] for _, logprobs, _ in arrays)
    cut = [(token_ids[:, :width], logprobs[:, :width], ranks) for token_ids, logprobs, ranks in arrays]
    return LogprobsLists(*(np.concatenate(each) for each in zip(*cut, strict=True)))  # type: ignore[arg-type]
