"""A scheduler that makes plain steps itself, and skips needless allocations of blocks, does what vLLM's does."""

from __future__ import annotations

import dataclasses
from collections import deque
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
    """Whatever workers and the front end learn of requests that come, end, are aborted, preempted and paused."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    rng = np.random.default_rng(0)
    add_requests(scheduler, range(NUM_REQUESTS // 2), rng, can_stop=True)
    found, in_flight, number = list[Any](), deque[Any](), 0
    while scheduler.has_unfinished_requests() or number < PAUSED.stop:
        scheduler.set_pause_state(PauseState.PAUSED_NEW if number in PAUSED else PauseState.UNPAUSED)
        if number == PAUSED.start:
            add_requests(scheduler, range(NUM_REQUESTS // 2, NUM_REQUESTS), rng, can_stop=True)
        if resets and number % 30 == 10:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        step = scheduler.schedule()
        found.append(plain(step))
        in_flight.append((step, sampled(scheduler, step, rng, num_ids=40)))
        if len(in_flight) > is_async:
            found.append(by_request(scheduler.update_from_output(*in_flight.popleft())))
        if number % 20 == 0 and scheduler.running:
            scheduler.finish_requests(scheduler.running[-1].request_id, RequestStatus.FINISHED_ABORTED)
        pool = scheduler.kv_cache_manager.block_pool
        found.append((hashes(scheduler), pool.get_num_free_blocks(), [state(each) for each in scheduler.running]))
        number += 1
        assert number < 2000
    return found


def plain(step: Any) -> dict[str, Any]:
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    values["scheduled_cached_reqs"] = vars(values["scheduled_cached_reqs"])
    values["scheduled_new_reqs"] = [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs]
    return values | {"order": list(step.num_scheduled_tokens)}


def by_request(by_client: dict[int, Any]) -> list[Any]:
    """What of outputs does not depend on when logprobs travel."""
    outputs = [output for each in by_client.values() for output in each.outputs]
    return sorted(
        (output.request_id, list(output.new_token_ids), str(output.finish_reason), output.stop_reason)
        for output in outputs
    )


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

    from skyrl_train.engines.vllm import plain_steps, whole_logprobs

    counts = {"schedule_plain": 0, "take_plain": 0}

    def counting(name: str) -> None:
        function = getattr(plain_steps, name)

        def counted(*args: Any) -> Any:
            result = function(*args)
            counts[name] += bool(result if name == "schedule_plain" else result[1])
            return result

        monkeypatch.setattr(whole_logprobs, name, counted)

    counting("schedule_plain")
    counting("take_plain")
    kinds = (
        (whole_logprobs.KeepsLogprobsAsync, AsyncScheduler) if is_async else (whole_logprobs.KeepsLogprobs, Scheduler)
    )
    ours, theirs = (scheduler(model, kind, num_blocks=num_blocks, caching=caching) for kind in kinds)
    assert ours.kv_cache_manager.allocate_slots.__name__ == "allocate_if_needed"
    ours.use_v2_model_runner = theirs.use_v2_model_runner = runner == 2
    found, expected = trace(ours, is_async, resets), trace(theirs, is_async, resets)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, number
    if num_blocks == 400 and not resets:
        assert counts["schedule_plain"] > 40 and counts["take_plain"] > 80
    assert any(step["preempted_req_ids"] for step in expected if isinstance(step, dict)) == (num_blocks == 40 or resets)
