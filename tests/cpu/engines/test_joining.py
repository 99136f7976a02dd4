"""Requests that wait join many that decode several at a time, and get the answers that vLLM's scheduler gives them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.scheduling import MAX_LEN, add_requests, scheduler
from tests.support.tiny import write_tiny_model

NUM_REQUESTS = 60
Answers = dict[str, list[tuple[int, float]]]


class Run:
    """A scheduler's run to the end of all requests; a request's name and length decide its tokens and logprobs."""

    def __init__(self, made: Any) -> None:
        self.answers: Answers = defaultdict(list)
        self.joining: list[int] = []
        """Numbers of the steps with new requests."""
        self.longest_wait = 0
        """Most steps in a row in which a request waited beside a free slot."""
        add_requests(made, range(NUM_REQUESTS), np.random.default_rng(0))
        counts, in_flight, number, waited = Counter[str](), deque[Any](), 0, 0
        while made.has_unfinished_requests():
            could_join = len(made.running) < made.max_num_running_reqs and bool(made.waiting)
            step = made.schedule()
            if step.scheduled_new_reqs:
                self.joining.append(number)
            waited = waited + 1 if could_join and not step.scheduled_new_reqs else 0
            self.longest_wait = max(self.longest_wait, waited)
            in_flight.append((step, _output(made, step, counts)))
            if number:
                self._take(made.update_from_output(*in_flight.popleft()))
            number += 1
            assert number < 2000

    def _take(self, by_client: dict[int, Any]) -> None:
        for output in (each for outputs in by_client.values() for each in outputs.outputs):
            found = output.new_logprobs
            if found is not None:
                pairs = zip(found.logprob_token_ids[:, 0].tolist(), found.logprobs[:, 0].tolist(), strict=True)
                self.answers[output.request_id] += pairs
            self.answers[f"{output.request_id} tokens"] += [(token, 0.0) for token in output.new_token_ids]


def _output(made: Any, step: Any, counts: Counter[str]) -> Any:
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    ids, tokens, logprobs = list(step.num_scheduled_tokens), list[list[int]](), list[float]()
    for name in ids:
        is_whole = not made.requests[name].is_prefill_chunk
        counts[name] += is_whole
        tokens.append([(int(name) + counts[name]) % 9] * is_whole)
        logprobs.append(int(name) + counts[name] / 100)
    chosen = np.array([each[0] if each else 0 for each in tokens], np.int32)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(chosen[:, None], np.array(logprobs, np.float32)[:, None], np.zeros(len(ids), np.int32)),
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def test_requests_that_join_together_get_the_answers_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from skyrl_train.engines.vllm.scheduling import joining
    from skyrl_train.engines.vllm.scheduling.scheduler import KeepsLogprobsAsync

    model = write_tiny_model(tmp_path, max_position_embeddings=MAX_LEN)

    def run(kind: Any) -> Run:
        return Run(scheduler(model, kind, num_blocks=400, caching=True))

    theirs, at_once = run(AsyncScheduler), run(KeepsLogprobsAsync)
    assert at_once.joining == theirs.joining and at_once.longest_wait == theirs.longest_wait
    monkeypatch.setattr(joining, "MANY", 6)
    monkeypatch.setattr(joining, "IDLE_SHARE", 2.0)
    together = run(KeepsLogprobsAsync)
    assert together.answers == at_once.answers == theirs.answers and len(theirs.answers) >= NUM_REQUESTS
    assert len(together.joining) < len(theirs.joining) / 2
    assert theirs.longest_wait < together.longest_wait <= joining.LONGEST


@pytest.mark.parametrize(
    ("running", "ready", "held"),
    [(127, 1, 0), (128, 32, 0), (128, 31, 1), (512, 8, 15), (512, 1, 16), (512, 64, 1), (1000, 24, 10)],
)
def test_how_long_requests_are_held(running: int, ready: int, held: int):
    from skyrl_train.engines.vllm.scheduling.joining import Joining

    rule = Joining()
    for _ in range(2):
        steps = 0
        while rule.is_held(running, ready):
            steps += 1
        assert steps == held
        rule.reset()
