"""Requests that wait join many that decode several at a time, and get the answers that vLLM's scheduler gives them."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.engines.vllm.scheduling import joining
from skyrl_train.engines.vllm.scheduling.joining import Joining
from tests.support.scheduling import MAX_LEN, add_requests, scheduler
from tests.support.tiny import write_tiny_model

NUM_REQUESTS, ABORTED, PAUSED = 60, "7", range(40, 44)
Answers = dict[str, list[tuple[int, float]]]


class Run:
    """A scheduler's run to the end of all requests; a request's name and its length decide its tokens and logprobs.

    Requests come in four groups; one is aborted, and for some steps none may join.
    """

    def __init__(self, made: Any) -> None:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        self.answers: Answers = defaultdict(list)
        self.joining: list[int] = []
        """Numbers of the steps with new requests."""
        self.longest_wait = 0
        """Most steps in a row in which a request waited beside a free slot, outside the pause."""
        rng, in_flight, number, waited = np.random.default_rng(0), deque[Any](), 0, 0
        while made.has_unfinished_requests() or number < 80:
            if number % 25 == 0 and number < 100:
                first = NUM_REQUESTS // 4 * (number // 25)
                add_requests(made, range(first, first + NUM_REQUESTS // 4), rng)
            if number == 30:
                made.finish_requests(ABORTED, RequestStatus.FINISHED_ABORTED)
            made.set_pause_state(PauseState.PAUSED_NEW if number in PAUSED else PauseState.UNPAUSED)
            could_join = len(made.running) < made.max_num_running_reqs and bool(made.waiting) and number not in PAUSED
            step = made.schedule()
            joined = bool(step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids)
            if joined:
                self.joining.append(number)
            waited = waited + 1 if could_join and not joined else 0
            self.longest_wait = max(self.longest_wait, waited)
            in_flight.append((step, _output(made, step)))
            if number:
                self._take(made.update_from_output(*in_flight.popleft()))
            number += 1
            assert number < 3000
        for name in (ABORTED, f"{ABORTED} tokens"):
            self.answers.pop(name, None)

    def _take(self, by_client: dict[int, Any]) -> None:
        for output in (each for outputs in by_client.values() for each in outputs.outputs):
            found = output.new_logprobs
            if found is not None:
                pairs = zip(found.logprob_token_ids[:, 0].tolist(), found.logprobs[:, 0].tolist(), strict=True)
                self.answers[output.request_id] += pairs
            self.answers[f"{output.request_id} tokens"] += [(token, 0.0) for token in output.new_token_ids]


def _output(made: Any, step: Any) -> Any:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    places = [(int(name), made.requests[name].num_computed_tokens) for name in ids]
    chosen = np.array([(name + place) % 9 for name, place in places], np.int32)
    logprobs = np.array([name + place / 100 for name, place in places], np.float32)
    is_whole = [not made.requests[name].is_prefill_chunk for name in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=[[int(token)] * whole for token, whole in zip(chosen, is_whole, strict=True)],
        logprobs=LogprobsLists(chosen[:, None], logprobs[:, None], np.zeros(len(ids), np.int32)),
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("num_blocks", [60, 400], ids=["preemption", "room"])
def test_requests_that_join_together_get_the_answers_of_vllm(
    num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobsAsync

    model = write_tiny_model(tmp_path, max_position_embeddings=MAX_LEN)

    def run(kind: Any) -> Run:
        return Run(scheduler(model, kind, num_blocks=num_blocks, caching=True))

    theirs, at_once = run(AsyncScheduler), run(KeepsLogprobsAsync)
    assert at_once.joining == theirs.joining and at_once.longest_wait == theirs.longest_wait
    monkeypatch.setattr(joining, "MANY", 4)
    monkeypatch.setattr(joining, "FEW", 2.0)
    monkeypatch.setattr(joining, "COST", 2.0)
    together = run(KeepsLogprobsAsync)
    assert together.answers == at_once.answers == theirs.answers and len(theirs.answers) >= NUM_REQUESTS
    assert len(together.joining) < len(theirs.joining)
    if num_blocks == 400:
        assert theirs.longest_wait < together.longest_wait <= joining.LONGEST


@pytest.mark.parametrize(
    ("running", "free", "waiting", "held"),
    [
        (127, 1, 1, 0),
        (128, 32, 32, 3),
        (128, 31, 40, 4),
        (128, 33, 1, 0),  # many slots are free
        (512, 32, 100, 15),
        (512, 8, 1, 24),
        (512, 64, 64, 7),
        (1000, 64, 70, 15),
    ],
)
def test_how_long_requests_are_held(running: int, free: int, waiting: int, held: int):
    rule = Joining()
    for _ in range(2):
        steps = 0
        while not rule.joins(running, free, waiting):
            steps += 1
        assert steps == held
        rule.reset()
    assert not rule.joins(running, 0, waiting) and not rule.joins(running, free, 0)
