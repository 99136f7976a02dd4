"""A scheduler that makes plain steps itself, and skips needless allocations of blocks, does what vLLM's does."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.scheduling import MAX_LEN, add_requests, hashes, sampled, scheduler
from tests.support.tiny import write_tiny_model

NUM_REQUESTS, PAUSED = 36, range(40, 44)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LEN)


def trace(scheduler: Any, is_async: bool, resets: bool) -> list[Any]:
    """Whatever workers and the front end learn of requests that come, end, are aborted, preempted and paused; at last
    the logprobs of those that ended.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    rng = np.random.default_rng(0)
    add_requests(scheduler, range(NUM_REQUESTS // 2), rng, can_stop=True)
    found, in_flight, number = list[Any](), deque[Any](), 0
    logprobs, ended = defaultdict[str, list[Any]](list), set[str]()
    while scheduler.has_unfinished_requests() or number < PAUSED.stop:
        scheduler.set_pause_state(PauseState.PAUSED_NEW if number in PAUSED else PauseState.UNPAUSED)
        if number == PAUSED.start:
            add_requests(scheduler, range(NUM_REQUESTS // 2, NUM_REQUESTS), rng, can_stop=True)
        if resets and number % 37 == 30:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        step = scheduler.schedule()
        found.append(plain(step))
        in_flight.append((step, sampled(scheduler, step, rng, num_ids=40)))
        if len(in_flight) > is_async:
            outputs = outputs_of(scheduler.update_from_output(*in_flight.popleft()))
            found.append([plain_output(output) for output in outputs])
            for output in outputs:
                if output.new_logprobs is not None:
                    logprobs[output.request_id] += zip(
                        *(each.tolist() for each in output.new_logprobs[:3]), strict=True
                    )
                if output.finish_reason is not None:
                    ended.add(output.request_id)
        if number % 20 == 0 and scheduler.running:
            scheduler.finish_requests(scheduler.running[-1].request_id, RequestStatus.FINISHED_ABORTED)
        pool = scheduler.kv_cache_manager.block_pool
        found.append((hashes(scheduler), pool.get_num_free_blocks(), [state(each) for each in scheduler.running]))
        number += 1
        assert number < 2000
    return [*found, {each: logprobs[each] for each in ended}]


def plain(step: Any) -> dict[str, Any]:
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    values["scheduled_cached_reqs"] = vars(values["scheduled_cached_reqs"])
    values["scheduled_new_reqs"] = [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs]
    return values | {"order": list(step.num_scheduled_tokens)}


def outputs_of(by_client: dict[int, Any]) -> list[Any]:
    outputs = [output for each in by_client.values() for output in each.outputs]
    return sorted(outputs, key=lambda output: output.request_id)


def plain_output(output: Any) -> tuple[Any, ...]:
    """What of an output does not depend on when logprobs travel."""
    stats = str(output.prefill_stats)
    return output.request_id, list(output.new_token_ids), str(output.finish_reason), output.stop_reason, stats


def state(request: Any) -> dict[str, Any]:
    kinds = int | str | bool | list | None
    values = {name: value for name, value in vars(request).items() if isinstance(value, kinds)}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("resets", [False, True], ids=["", "resets"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("caching", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("num_blocks", [40, 400], ids=["preemption", "room"])
def test_steps_and_outputs_are_those_of_vllm(
    model: Path,
    num_blocks: int,
    caching: bool,
    is_async: bool,
    resets: bool,
    runner: int,
    monkeypatch: pytest.MonkeyPatch,
):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from skyrl_train.engines.vllm.scheduling.plain_steps import PlainSteps
    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobs, KeepsLogprobsAsync

    counts = {"_advance": 0, "_append": 0}

    def counting(name: str) -> None:
        function = getattr(PlainSteps, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(PlainSteps, name, counted)

    counting("_advance")
    counting("_append")
    kinds = (KeepsLogprobsAsync, AsyncScheduler) if is_async else (KeepsLogprobs, Scheduler)
    ours, theirs = (scheduler(model, kind, num_blocks=num_blocks, caching=caching) for kind in kinds)
    assert ours.kv_cache_manager.allocate_slots.__name__ == "allocate_if_needed"
    ours.use_v2_model_runner = theirs.use_v2_model_runner = runner == 2
    found, expected = trace(ours, is_async, resets), trace(theirs, is_async, resets)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, number
    if num_blocks == 400 and not resets:
        assert counts["_advance"] > 40 and counts["_append"] > 40
    assert any(step["preempted_req_ids"] for step in expected[:-1] if isinstance(step, dict)) == (
        num_blocks == 40 or resets
    )


def test_a_token_from_before_a_preemption_is_left_to_vllm(model: Path):
    """The request runs again, alone as before, when the token comes."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobsAsync

    def states(kind: Any) -> list[Any]:
        made, rng = scheduler(model, kind, num_blocks=400, caching=True), np.random.default_rng(0)
        add_requests(made, range(1), rng)
        found, in_flight = list[Any](), deque[Any]()
        for number in range(30):
            if number == 20:
                made.reset_prefix_cache(reset_running_requests=True)
            step = made.schedule()
            in_flight.append((step, sampled(made, step, rng)))
            if number:
                made.update_from_output(*in_flight.popleft())
            found.append([state(request) for request in made.running])
        return found

    found = states(KeepsLogprobsAsync)
    assert found == states(AsyncScheduler) and all(found)
