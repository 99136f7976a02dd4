"""Steps in which every running request decodes one token, made with a fraction of vLLM's time for each request.

vLLM's scheduler (0.26 to 0.33) passes every request through code for prefills, preemption, drafts, images, connectors
and pauses: more time for each step of 512 requests than the GPU needs for a model of 0.6 billion parameters
(benchmarks/studies/scheduler_time.py). Here what decides about the next step is held in arrays over all requests
(decode_batch.py), and vLLM's objects are only advanced by a token. Whatever is not plain is left to vLLM: the schedule
of a step with something else in it, and the tokens after which a request may end. The schedules are those
of vLLM, but requests that wait may join in a later step (joining.py).
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from skyrl_train.engines.vllm.scheduling.decode_batch import STALE, Bools, DecodeBatch, Ints, at, continues, picked
from skyrl_train.engines.vllm.scheduling.joining import Joining
from skyrl_train.engines.vllm.scheduling.kept_logprobs import KeptLogprobs, Part, StepLogprobs, joined
from skyrl_train.engines.vllm.scheduling.kv_blocks import has_one_kind_of_block

Scheduler = Any
"""vLLM's, of which this module reads attributes that differ between versions."""
FEATURES = (
    *("connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask"),
    *("is_mm_encoder_only", "is_encoder_decoder", "num_spec_tokens", "num_lookahead_tokens", "use_pp", "perf_metrics"),
)
"""Attributes of a scheduler that does more for each request, where they are set."""


def has_plain_steps(scheduler: Scheduler) -> bool:
    """Whether a scheduler's plain steps can be made here: its model and settings need nothing more for each request."""
    return (
        len(STALE) == 1
        and has_one_kind_of_block(scheduler.kv_cache_manager)
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.parallel_config.data_parallel_size == 1
        and getattr(scheduler, "local_prefill_interval", 1) <= 1
        and not any(getattr(scheduler, feature, None) for feature in FEATURES)
    )


class _Step(NamedTuple):
    """A plain step that is being computed."""

    output: Any
    batch: DecodeBatch
    computed: Ints
    """Column of the batch when the step was scheduled."""
    running: list[Request]
    num_other: int
    """Steps of vLLM before it."""


class PlainSteps:
    """The plain steps of one scheduler."""

    def __init__(self, scheduler: Scheduler, kept: KeptLogprobs) -> None:
        self._scheduler, self._kept = scheduler, kept
        self._manager = scheduler.kv_cache_manager
        (self._group,) = self._manager.coordinator.single_type_managers
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._joining = Joining()
        self._batch: DecodeBatch | None = None
        """None if a step of vLLM may have changed requests since."""
        self._running: list[Request] = []
        """What ran at the last plain step: the batch, and requests whose last token is being computed."""
        self._in_flight: deque[_Step] = deque()
        self._num_other = 0

    def schedule(self, schedule: Callable[[], Any]) -> Any:
        """vLLM's SchedulerOutput of the next step. Args: schedule: vLLM's own method."""
        batch = self._next_batch()
        growing = [] if batch is None else self._growing(batch)
        if batch is None or len(growing) > self._manager.block_pool.get_num_free_blocks():
            self._batch = None
            self._num_other += 1
            output = schedule()
            if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
                self._joining.reset()
            return output
        scheduler, computed = self._scheduler, batch.table["computed"].copy()
        new_blocks = self._new_blocks(batch, growing)
        whole_ids: dict[str, list[int]] = {}
        if not scheduler.use_v2_model_runner:
            before = scheduler.prev_step_scheduled_req_ids
            unknown = [request_id for request_id in batch.ids if request_id not in before]
            whole_ids = {request_id: scheduler.requests[request_id].all_token_ids.copy() for request_id in unknown}
        scheduler._pause_state = PauseState.PAUSED_ALL  # so that vLLM makes an output without requests
        try:
            output = schedule()
        finally:
            scheduler._pause_state = PauseState.UNPAUSED
        assert not output.num_scheduled_tokens, "vLLM has scheduled requests although it pauses"
        output.num_scheduled_tokens = dict.fromkeys(batch.ids, 1)
        output.total_num_scheduled_tokens = len(batch.ids)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=batch.ids.copy(),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=whole_ids,
            new_block_ids=new_blocks,
            num_computed_tokens=computed.tolist(),
            num_output_tokens=(computed + batch.table["output_less_computed"]).tolist(),
        )
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(batch.ids)
        self._in_flight.append(_Step(output, batch, computed, self._running, self._num_other))
        self._advance(batch)
        return output

    def _next_batch(self) -> DecodeBatch | None:
        """Requests of the next step, None if it is not plain."""
        scheduler, batch = self._scheduler, self._batch
        running = scheduler.running
        limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        num_free = max(0, limit - len(running) - scheduler.num_waiting_for_streaming_input)
        if scheduler._pause_state != PauseState.UNPAUSED:
            return None
        if self._joining.joins(len(running), num_free, scheduler.get_request_counts()[1]):
            return None
        if batch is not None and running != self._running:
            left = [request for request in self._running if request.status is RequestStatus.RUNNING]
            batch = batch.running() if left == running else None
        batch = batch or DecodeBatch.of(running, scheduler.max_model_len, self._kept.may_wait)
        if batch is None or (len(batch.ids) and batch.table["computed"].max() > scheduler.max_model_len - 2):
            return None
        self._batch = batch = batch.continuing()
        self._running = running.copy()
        return batch if 0 < len(batch.ids) <= scheduler.max_num_scheduled_tokens else None

    def _growing(self, batch: DecodeBatch) -> list[int]:
        """Numbers of the requests that need a block, or have one more for the prefix cache. After a step, each has room
        up to the end of a block, and the prefix cache all its full ones: it can be one only at the ends of a block.
        """
        blocks, num_cached, size = self._group.req_to_blocks, self._group.num_cached_block, self._group.block_size
        computed, caches = batch.table["computed"], self._manager.enable_caching
        place = computed % size
        near = np.flatnonzero((place <= 1) | (place == size - 1))
        growing = []
        for number, end in zip(near.tolist(), (computed[near] + 1).tolist(), strict=True):
            request_id, num_known = batch.ids[number], len(batch.requests[number]._all_token_ids)
            has_room = end <= size * len(blocks[request_id])
            if not has_room or (caches and min(end, num_known) // size > num_cached.get(request_id, 0)):
                growing.append(number)
        return growing

    def _new_blocks(self, batch: DecodeBatch, growing: list[int]) -> list[tuple[list[int]] | None]:
        """Ids of the new blocks of each request, as vLLM's `allocate_slots` gives them."""
        ids: list[tuple[list[int]] | None] = [None] * len(batch.ids)
        for number in growing:
            request, end = batch.requests[number], int(batch.table["computed"][number]) + 1
            blocks = self._group.allocate_new_blocks(request.request_id, end, end)
            self._manager.cache_blocks(request, min(end, request.num_tokens))
            ids[number] = ([block.block_id for block in blocks],) if blocks else None
        return ids

    def _advance(self, batch: DecodeBatch) -> None:
        """What vLLM's `_update_after_schedule` changes in requests that decode one token."""
        for request in batch.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        if self._is_async:
            no_drafts: list[int] = []
            for request in batch.requests:
                request.num_output_placeholders += 1
                request.spec_token_ids = no_drafts
            if self._scheduler.use_v2_model_runner:
                eligible = self._scheduler.current_step + 1
                for request in batch.requests:
                    request.next_decode_eligible_step = eligible
        batch.table["computed"] += 1

    def take(self, step: Any, output: Any) -> tuple[Any, dict[int, list[EngineCoreOutput]]]:
        """Give their tokens to the requests that continue plainly.

        Args: step: vLLM's SchedulerOutput; output: its ModelRunnerOutput, with StepLogprobs.
        Returns: the step with the requests that are left to vLLM, and the outputs of the others by client.
        """
        if not any(each.output is step for each in self._in_flight):
            return self._take_mixed(step, output)
        while (plain := self._in_flight.popleft()).output is not step:
            pass
        batch, rows = plain.batch, _rows(plain.batch, output)
        sampled = at(rows, output.sampled_token_ids)
        tokens = [token for each in sampled for token in each]
        chosen = np.zeros(len(batch.ids), bool)
        if all(sampled) and len(tokens) == len(batch.ids):  # one for each
            is_sure = plain.num_other == self._num_other and plain.running == self._scheduler.running
            chosen = ~batch.ending(plain.computed, np.array(tokens), are_sure=is_sure)
        for number in np.flatnonzero(~chosen):
            batch.grid.end(batch.table["column"][number])
        taken: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        if chosen.any():
            self._append(plain, chosen, tokens)
            outputs = list(map(EngineCoreOutput, *picked(chosen, batch.ids, sampled)))
            if output.logprobs is not None:
                self._keep(batch, chosen, output.logprobs, np.array(rows))
                sends = np.flatnonzero(batch.table["sends"][chosen])
                for number, row in zip(sends, np.array(rows)[chosen][sends], strict=True):
                    outputs[number].new_logprobs = joined([Part(output.logprobs, row, 1)])
            for client, each in zip(batch.table["client"][chosen].tolist(), outputs, strict=True):
                taken[client].append(each)
        rest = copy.copy(step)
        rest.num_scheduled_tokens = {batch.ids[number]: 1 for number in np.flatnonzero(~chosen)}
        return rest, taken

    def _take_mixed(self, step: Any, output: Any) -> tuple[Any, dict[int, list[EngineCoreOutput]]]:
        """Like `take`, of a step of vLLM: there are prompts in it, or it waits for the first token of some."""
        taken: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        if _has_more(output):
            return step, taken
        scheduler, size, left = self._scheduler, self._group.block_size, dict[str, int]()
        for request_id, number in step.num_scheduled_tokens.items():
            request, row = scheduler.requests.get(request_id), output.req_id_to_index[request_id]
            tokens = output.sampled_token_ids[row]
            if number != 1 or request is None or not continues(request, tokens, scheduler.max_model_len):
                left[request_id] = number
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            if len(request._all_token_ids) % size == 0:
                request.update_block_hashes()
            if self._is_async:
                request.num_output_placeholders -= 1
                self._manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            logprobs = None
            if output.logprobs is not None and request.sampling_params.num_logprobs is not None:
                logprobs = self._kept.kept_or_joined(request_id, Part(output.logprobs, row, 1))
            taken[request.client_index].append(EngineCoreOutput(request_id, tokens, logprobs))
        rest = copy.copy(step)
        rest.num_scheduled_tokens = left
        return rest, taken

    def _append(self, plain: _Step, chosen: Bools, tokens: list[int]) -> None:
        """What vLLM's `update_from_output` changes in requests that continue, and in the prefix cache."""
        batch, size, computed = plain.batch, self._group.block_size, plain.computed
        requests, own = picked(chosen, batch.requests, tokens)
        for request, token in zip(requests, own, strict=True):
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
        for request in at(np.flatnonzero(chosen & ((computed + 2) % size == 0)), batch.requests):
            request.update_block_hashes()
        if self._is_async:
            for request in requests:
                request.num_output_placeholders -= 1
            for request in at(np.flatnonzero(chosen & ((computed + 1) % size <= 1)), batch.requests):
                known = request.num_computed_tokens - request.num_output_placeholders
                self._manager.cache_blocks(request, known)

    def _keep(self, batch: DecodeBatch, chosen: Bools, logprobs: StepLogprobs, rows: Ints) -> None:
        keeps = np.flatnonzero(batch.table["keeps"] & chosen)
        columns = batch.table["column"][keeps]
        for number in keeps[~batch.grid.is_open[columns]]:
            self._kept.keep(batch.ids[number], batch.grid.begin(batch.table["column"][number]))
        batch.grid.add(columns, [array[rows[keeps]] for array in logprobs.flat])


def _rows(batch: DecodeBatch, output: Any) -> list[int]:
    """Rows of a model's output, one for each request; none if it has more than a token and its logprob for any."""
    if _has_more(output) or (output.logprobs is not None and not output.logprobs.is_flat):
        return []
    if output.req_ids == batch.ids:
        return list(range(len(batch.ids)))
    return [output.req_id_to_index[request_id] for request_id in batch.ids]


def _has_more(output: Any) -> bool:
    """Whether a model's output has more than sampled tokens and their logprobs."""
    more = output.pooler_output or output.prompt_logprobs_dict or output.num_nans_in_logits
    return bool(more or not output.sampled_token_ids)
