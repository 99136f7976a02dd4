"""Steps in which every running request decodes one token, made with a fraction of vLLM's time for each request.

vLLM's scheduler (0.26 to 0.33) passes every request through code for prefills, preemption, drafts, images, connectors
and pauses: 3 + 3 microseconds for each request and step, more than the GPU needs for a model of 0.6 billion parameters
and 512 requests. Here whatever is not plain is left to vLLM: a step with something else in it, and within a step the
tokens after which a request may end. The schedules are those of vLLM.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from skyrl_train.engines.vllm.kv_blocks import has_one_kind_of_block

Scheduler = Any
"""vLLM's, of which this module reads attributes that differ between versions."""
FEATURES = (
    *("connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask"),
    *("is_mm_encoder_only", "is_encoder_decoder", "num_spec_tokens", "num_lookahead_tokens", "use_pp", "perf_metrics"),
)
"""Attributes of a scheduler that does more for each request, where they are set."""
STALE = {"num_stale_output_tokens", "async_tokens_to_discard"} & {*Request.__init__.__code__.co_names}
"""Attribute of a request with tokens in flight from before its preemption; the second name is that of 0.26."""
_is_stale = attrgetter(*STALE or ["status"])


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


@dataclass(slots=True)
class _Plan:
    """Requests of the next step, in the order in which they run, and what workers receive about them."""

    ids: list[str] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_output: list[int] = field(default_factory=list)
    growing: list[tuple[int, Request]] = field(default_factory=list)
    """(index, request) where vLLM must add a block to the request or to the prefix cache."""


def schedule_plain(scheduler: Scheduler, schedule: Callable[[], Any]) -> Any:
    """vLLM's SchedulerOutput of a plain step, None if the next step is another.
    Args: scheduler: with plain steps; schedule: vLLM's own method.
    """
    plan, manager = _plan(scheduler), scheduler.kv_cache_manager
    if plan is None or not 0 < len(plan.ids) <= scheduler.max_num_scheduled_tokens:
        return None
    if len(plan.growing) > manager.block_pool.get_num_free_blocks():
        return None
    new_blocks: list[Any] = [None] * len(plan.ids)
    for index, request in plan.growing:
        new_blocks[index] = manager.allocate_slots(request, 1, num_lookahead_tokens=0).get_block_ids(allow_none=True)
    whole_ids: dict[str, list[int]] = {}
    if not scheduler.use_v2_model_runner:
        before = scheduler.prev_step_scheduled_req_ids
        unknown = [request_id for request_id in plan.ids if request_id not in before]
        whole_ids = {request_id: scheduler.requests[request_id].all_token_ids.copy() for request_id in unknown}
    scheduler._pause_state = PauseState.PAUSED_ALL  # so that vLLM makes an output without requests
    try:
        output = schedule()
    finally:
        scheduler._pause_state = PauseState.UNPAUSED
    assert not output.num_scheduled_tokens, "vLLM has scheduled requests although it pauses"
    output.num_scheduled_tokens = dict.fromkeys(plan.ids, 1)
    output.total_num_scheduled_tokens = len(plan.ids)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=plan.ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids=whole_ids,
        new_block_ids=new_blocks,
        num_computed_tokens=plan.num_computed,
        num_output_tokens=plan.num_output,
    )
    if not scheduler.use_v2_model_runner:
        scheduler.prev_step_scheduled_req_ids.update(plan.ids)
    scheduler._update_after_schedule(output)
    return output


def _plan(scheduler: Scheduler) -> _Plan | None:
    """None if the next step is not plain."""
    running = scheduler.running
    limit = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    is_full = len(running) + scheduler.num_waiting_for_streaming_input >= limit
    if scheduler._pause_state != PauseState.UNPAUSED or not (is_full or scheduler.get_request_counts()[1] == 0):
        return None
    (group,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks, num_cached, size = group.req_to_blocks, group.num_cached_block, group.block_size
    caches, last = scheduler.kv_cache_manager.enable_caching, scheduler.max_model_len - 2
    plan = _Plan()
    ids, num_computed, num_output, growing = plan.ids, plan.num_computed, plan.num_output, plan.growing
    for request in running:
        computed, held = request.num_computed_tokens, request.num_output_placeholders
        tokens = len(request._all_token_ids)
        if (
            tokens + held - computed != 1
            or computed > last
            or request.is_prefill_chunk
            or request.spec_token_ids
            or request.mm_features
        ):
            return None
        if held and computed + 2 - held >= request.num_prompt_tokens + request.max_tokens:
            continue  # its last token is being computed
        request_id, end = request.request_id, computed + 1
        has_slot = end <= size * len(blocks[request_id])
        if not has_slot or (caches and min(end, tokens) // size > num_cached.get(request_id, 0)):
            growing.append((len(ids), request))
        ids.append(request_id)
        num_computed.append(computed)
        num_output.append(len(request._output_token_ids) + held)
    return plan


def take_plain(
    scheduler: Scheduler, step: Any, output: Any, logprobs_of: Callable[[str, int], Any]
) -> tuple[Any, dict[int, list[EngineCoreOutput]]]:
    """Give their tokens to the requests that continue plainly.

    Args: step: vLLM's SchedulerOutput; output: its ModelRunnerOutput; logprobs_of: (request, its index) -> what its
        output carries.
    Returns: the step with the requests that are left to vLLM, and the outputs of the others by client.
    """
    taken: dict[int, list[EngineCoreOutput]] = defaultdict(list)
    if output.pooler_output or output.prompt_logprobs_dict or output.num_nans_in_logits or not output.sampled_token_ids:
        return step, taken
    requests, sampled, index_of = scheduler.requests, output.sampled_token_ids, output.req_id_to_index
    manager, has_logprobs = scheduler.kv_cache_manager, output.logprobs is not None
    (group,) = manager.coordinator.single_type_managers
    num_cached, size, caches = group.num_cached_block, group.block_size, manager.enable_caching
    longest, is_async = scheduler.max_model_len, isinstance(scheduler, AsyncScheduler)
    is_running, left = RequestStatus.RUNNING, dict[str, int]()
    for request_id, number in step.num_scheduled_tokens.items():
        request = requests.get(request_id)
        if request is None or number != 1 or request.status is not is_running:
            left[request_id] = number
            continue
        index = index_of[request_id]
        tokens = sampled[index]
        if len(tokens) != 1:
            left[request_id] = number
            continue
        params, own, all_ids, token = (
            request.sampling_params,
            request._output_token_ids,
            request._all_token_ids,
            tokens[0],
        )
        if (
            len(own) + 1 >= request.max_tokens
            or len(all_ids) + 1 >= longest
            or token == params.eos_token_id
            or (params.stop_token_ids and token in params.stop_token_ids)
            or params.repetition_detection is not None
            or request.structured_output_request is not None
            or request.prefill_stats is not None
            or _is_stale(request)
            or request.events
            or request.mm_features
            or request.trace_headers
            or request.stop_reason is not None
            or request.num_nans_in_logits
        ):
            left[request_id] = number
            continue
        request.num_in_flight_tokens -= 1
        own.append(token)
        all_ids.append(token)
        if len(all_ids) % size == 0:
            request.update_block_hashes()
        if is_async:
            held = request.num_output_placeholders = request.num_output_placeholders - 1
            known = request.num_computed_tokens - held
            if caches and known // size > num_cached.get(request_id, 0):
                manager.cache_blocks(request, known)
        logprobs = logprobs_of(request_id, index) if has_logprobs and params.num_logprobs is not None else None
        taken[request.client_index].append(EngineCoreOutput(request_id, tokens, logprobs))
    rest = copy.copy(step)
    rest.num_scheduled_tokens = left
    return rest, taken
