"""Jobs of a service as a source of groups."""

from __future__ import annotations

import asyncio

import pytest

from skyrl_train.rollout.admission import Ledger
from skyrl_train.service.job import TrainJob
from skyrl_train.service.queue import StaleSamples
from skyrl_train.service.source import JobSource
from skyrl_train.types import Group
from tests.support.rollouts import prompt, sample


def job(*rewards: float, sampled_by: dict[int, str] | None = None) -> TrainJob:
    groups = tuple(Group(prompt(str(n)), (sample(reward), sample(0.0))) for n, reward in enumerate(rewards))
    return TrainJob(groups, has_logprobs=True, sampled_by=sampled_by or {})


def test_jobs_come_in_their_order_and_those_of_other_weights_are_refused_at_their_turn():
    version = 3
    source = JobSource(lambda: version)
    first, stale, last = job(1.0, 2.0), job(5.0, sampled_by={3: "group 0, sample 0"}), job(4.0)

    async def main() -> None:
        nonlocal version
        for each in (first, stale, last):
            source.put(each)
        assert source.ledger == Ledger(generated=4, waiting=4)
        assert await source.next() == list(first.groups)
        assert source.metrics() == {
            "reward/avg_raw_reward": 0.75,
            "generate/batch_num_seq": 4.0,
            "generate/avg_num_tokens": 1.0,
        }
        version = 4
        with pytest.raises(StaleSamples, match="group 0, sample 0 was sampled by version 3, .* version 4"):
            await source.next()
        assert await source.next() == list(last.groups)

    asyncio.run(main())
    assert source.ledger == Ledger(generated=4, trained=3, filtered=1)
