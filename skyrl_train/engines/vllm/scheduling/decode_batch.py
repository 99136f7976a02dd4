"""Requests that decode together: what decides about their next step, in arrays, so that none is asked in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request, RequestStatus

from skyrl_train.engines.vllm.scheduling.kept_logprobs import Grid

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
TABLE = np.dtype(
    [
        ("computed", np.int64),  # tokens whose keys and values are computed or being computed
        ("output_less_computed", np.int64),  # output tokens, with those being computed, less `computed`
        ("limit", np.int64),  # tokens of prompt and output at which the request ends
        ("eos", np.int64),  # the token that ends it, -1 for none
        ("client", np.int64),
        ("column", np.int64),  # of the grid
        ("keeps", np.bool_),  # whether its logprobs are kept until it ends
        ("sends", np.bool_),  # whether its logprobs are sent with each token
    ]
)
"""What is known of each request of a batch."""
STALE = {"num_stale_output_tokens", "async_tokens_to_discard"} & {*Request.__init__.__code__.co_names}
"""Attribute of a request with tokens in flight from before its preemption; the second name is that of 0.26."""
_stale_tokens = attrgetter(*STALE or ["status"])


@dataclass(slots=True)
class DecodeBatch:
    """Requests that decode a token in each step, in the order in which they run."""

    requests: list[Request]
    ids: list[str]
    table: npt.NDArray[Any]
    """A row of TABLE for each."""
    grid: Grid
    stops: Ints
    """Stop tokens of any of them."""

    @classmethod
    def of(cls, running: Sequence[Request], max_model_len: int, may_wait: Callable[[str], bool]) -> DecodeBatch | None:
        """None if one of the requests does more than to decode one token.
        Args: may_wait: whether the logprobs of a request may be kept until it ends.
        """
        rows, stops = list[tuple[Any, ...]](), set[int]()
        for column, request in enumerate(running):
            computed, held = request.num_computed_tokens, request.num_output_placeholders
            params = request.sampling_params
            if (
                len(request._all_token_ids) + held - computed != 1
                or params is None
                or request.is_prefill_chunk
                or request.spec_token_ids
                or request.mm_features
                or request.structured_output_request is not None
                or request.trace_headers
                or params.repetition_detection is not None
            ):
                return None
            stops.update(params.stop_token_ids or ())
            limit = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
            eos = -1 if params.eos_token_id is None else params.eos_token_id
            has_logprobs = params.num_logprobs is not None
            keeps = has_logprobs and may_wait(request.request_id)
            less = len(request._output_token_ids) + held - computed
            sends = has_logprobs and not keeps
            rows.append((computed, less, limit, eos, request.client_index, column, keeps, sends))
        ids = [request.request_id for request in running]
        return cls(list(running), ids, np.array(rows, TABLE), Grid(len(ids)), np.array([*stops], np.int64))

    def select(self, chosen: Bools) -> DecodeBatch:
        """The batch of some of the requests, with a narrower grid if more than half of its columns are left unused."""
        requests, ids = picked(chosen, self.requests, self.ids)
        table, grid = self.table[chosen], self.grid
        if 2 * len(ids) < grid.num_columns:
            table["column"], grid = np.arange(len(ids)), Grid(len(ids))
        return DecodeBatch(requests, ids, table, grid, self.stops)

    def running(self) -> DecodeBatch:
        """The batch of those that still run."""
        return self.select(np.array([request.status is RequestStatus.RUNNING for request in self.requests], bool))

    def continuing(self) -> DecodeBatch:
        """The batch without requests whose last token is being computed."""
        near = np.flatnonzero(self.table["computed"] + 2 >= self.table["limit"])
        ending = [number for number in near if _has_last_token(self.requests[number])]
        if not ending:
            return self
        chosen = np.ones(len(self.ids), bool)
        chosen[ending] = False
        return self.select(chosen)

    def ending(self, computed: Ints, tokens: Ints, *, are_sure: bool) -> Bools:
        """Which requests vLLM must look at: those that a token may end, or that may not have run all the time.

        Args: computed: column of the table when their step was scheduled; are_sure: whether all ran since then.
        """
        found: Bools = (tokens == self.table["eos"]) | (computed + 2 >= self.table["limit"])
        if len(self.stops):
            found |= np.isin(tokens, self.stops)
        if not are_sure:
            found |= [each.status is not RequestStatus.RUNNING or bool(_stale_tokens(each)) for each in self.requests]
        return found


def _has_last_token(request: Request) -> bool:
    """Whether the last token that it may have is being computed."""
    held = request.num_output_placeholders
    return bool(held) and request.num_computed_tokens + 2 - held >= request.num_prompt_tokens + request.max_tokens


def continues(request: Request, tokens: Sequence[int], max_model_len: int) -> bool:
    """Whether these tokens of a request that was scheduled for one token do nothing but to be appended."""
    params = request.sampling_params
    return (
        len(tokens) == 1
        and params is not None
        and request.status is RequestStatus.RUNNING
        and len(request._output_token_ids) + 1 < request.max_tokens
        and len(request._all_token_ids) + 1 < max_model_len
        and tokens[0] != params.eos_token_id
        and not (params.stop_token_ids and tokens[0] in params.stop_token_ids)
        and request.prefill_stats is None  # which the first token takes, like events
        and not request.events
        and not _stale_tokens(request)
        and not request.mm_features
        and request.structured_output_request is None
        and not request.trace_headers
        and params.repetition_detection is None
        and request.stop_reason is None
    )


def at(numbers: Iterable[int], values: Sequence[T]) -> list[T]:
    return [values[number] for number in numbers]


def picked(chosen: Bools, *lists: list[Any]) -> Sequence[list[Any]]:
    """The chosen elements of each list."""
    return lists if chosen.all() else [list(compress(each, chosen)) for each in lists]
