"""The comparison of engines and trainer after a sync, against a trainer and an engine of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.trainer.agreement.sync_check import FirstCheck, SyncCheck, SyncCheckFailed, batch_of
from skyrl_train.types import Group, Prompt, Sample, TrainBatch

LIMITS = MicroBatchLimits(dp_size=2, max_tokens=16, max_sample_tokens=64, min_micro_batches=2, micro_batch_multiple=2)


def group(uid: int, length: int) -> Group:
    sample = Sample(
        token_ids=torch.arange(length) + 100 * uid,
        loss_mask=torch.arange(length) > 0,
        rollout_logprobs=torch.zeros(length),
        prompt_length=1,
        rewards=torch.zeros(length, dtype=torch.float64),
        stop_reason="length",
        turns=1,
        policy_version=0,
    )
    return Group(Prompt(str(uid), [], "addition", {}, "sums"), (sample, sample))


def check_with(error: float, *, dtype_name: str = "float32", every: int = 10, tensor_float: bool = False) -> None:
    """One check of an engine whose logprobs are off by `error`."""

    async def trained(batch: TrainBatch) -> Tensor:
        return -batch.token_ids.float()

    async def served(prompts: Sequence[list[int]]) -> dict[str, Any]:
        return {"engine-0": [[error - token for token in prompt] for prompt in prompts]}

    policy: Any = SimpleNamespace(prompt_logprobs=trained, policy_version=3)
    engines: Any = SimpleNamespace(prompt_logprobs=served)
    check = SyncCheck(every, dtype_name, LIMITS, tensor_float=tensor_float, max_tokens=12)
    groups = [group(uid, length) for uid, length in enumerate([3, 9, 5, 12, 13])]

    async def main() -> None:
        expected = await check.expect(policy, groups)
        assert sorted(expected.batch.cu_seqlens.diff().tolist()) == [2, 4, 8, 11], "engines cannot score 13 tokens"
        await check.compare(engines, expected)

    asyncio.run(main())


def test_rounding_passes_and_other_weights_fail():
    check_with(5e-5)
    check_with(1e-3, dtype_name="bfloat16")
    check_with(1e-3, tensor_float=True)
    with pytest.raises(SyncCheckFailed, match="version 3 engine-0 .* 0.001 nats"):
        check_with(1e-3)


def test_nan_fails():
    with pytest.raises(SyncCheckFailed):
        check_with(float("nan"))


def test_checks_are_due_at_the_first_and_each_nth_sync():
    check = SyncCheck(3, "float32", LIMITS, tensor_float=False, max_tokens=64)
    assert [sync for sync in range(1, 10) if check.is_due(sync)] == [1, 3, 6, 9]
    assert not SyncCheck(0, "float32", LIMITS, tensor_float=False, max_tokens=64).is_due(1)


def test_the_fixed_samples_are_cut_as_the_layout_needs():
    """Interleaved pipelines want multiples of their size; more tokens than the limit do not fit the memory."""
    batch = batch_of([group(uid, 11) for uid in range(20)], LIMITS)
    (micro_batches,) = batch.mini_batches
    assert len(micro_batches) % 2 == 0
    assert sum(len(samples) for samples in micro_batches) == 8, "one sample of each of the first 8 groups"
    assert max(10 * len(samples) for samples in micro_batches) <= 16


def test_a_sample_that_fills_the_context_is_scored_without_its_last_token():
    batch = batch_of([group(0, 64), group(1, 1)], LIMITS)
    assert sorted(batch.cu_seqlens.diff().tolist()) == [1, 63]


def test_a_turn_that_is_a_sample_is_scored_without_the_later_turns_of_its_conversation():
    first, last = group(0, 11).samples
    turns = Group(group(0, 11).prompt, (replace(first, ends_conversation=False), last))
    assert batch_of([turns], LIMITS).cu_seqlens.tolist() == [0, 10]


def first_check(
    error: float, *, has_compared: bool = False, every: int = 10, dead: tuple[str, ...] | None = None
) -> bool:
    """Whether engines that are off by `error` were compared before an update. Args: dead: engines that fail."""

    async def trained(batch: TrainBatch) -> Tensor:
        return -batch.token_ids.float()

    async def served(prompts: Sequence[list[int]]) -> dict[str, Any]:
        if dead is not None:
            raise RemoteFailed("engine-0 died")
        return {"engine-0": [[error - token for token in prompt] for prompt in prompts]}

    async def drop_failed(failure: RemoteFailed, before: int) -> str:
        if not dead:
            raise failure
        return ", ".join(dead)

    async def main() -> bool:
        policy: Any = SimpleNamespace(prompt_logprobs=trained, policy_version=3)
        engines: Any = SimpleNamespace(updated=[0], prompt_logprobs=served, num_changes=0, drop_failed=drop_failed)
        check = SyncCheck(every, "float32", LIMITS, tensor_float=False, max_tokens=64)
        check.has_compared = has_compared
        first = FirstCheck(check, policy, engines)
        groups = [group(0, 5), group(1, 7)]
        scores = await first.scores(groups)
        await first.judge(scores, groups)
        return scores is not None

    return asyncio.run(main())


def test_engines_are_compared_before_the_first_update_of_a_process():
    assert first_check(5e-5)
    with pytest.raises(SyncCheckFailed, match="before the first update of version 3 engine-0 .* 5.3 nats"):
        first_check(5.3)


def test_engines_that_were_compared_and_runs_without_checks_are_not_held_up_by_the_first_comparison():
    assert not first_check(5.3, has_compared=True)
    assert not first_check(5.3, every=0)


def test_an_engine_that_fails_in_the_first_comparison_is_compared_after_its_first_sync():
    assert not first_check(5.3, dead=("engine-0",))
    with pytest.raises(RemoteFailed):
        first_check(5.3, dead=())
