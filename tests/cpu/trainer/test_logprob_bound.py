"""The bound on what engine and trainer may differ by, and what a run says beyond it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.policy_group import NoStepTaken, UpdateRefused
from skyrl_train.config import load_config
from skyrl_train.config.rl import LogprobDifferenceConfig
from skyrl_train.ranks import UpdateReport
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound, compared_share, is_compared
from skyrl_train.trainer.scorers import Scorers
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample
from tests.support.fake_actors import FakeRank, policy_group


def bound(
    dtype_name: str = "float32",
    *,
    warn: float | None = None,
    fail: float | None = None,
    tensor_float: bool = False,
    has_experts: bool = False,
) -> LogprobBound:
    config = LogprobDifferenceConfig(warn=warn, fail=fail)
    return LogprobBound(config, dtype_name, tensor_float=tensor_float, has_experts=has_experts)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (bound("float32"), (1e-4, 1e-3)),
        (bound("float32", tensor_float=True), (3e-3, 3e-2)),
        (bound("float32", has_experts=True), (1e-4, 1e-3)),
        (bound("float16"), (1e-2, 0.1)),
        (bound("bfloat16"), (0.05, 0.5)),
        (bound("bfloat16", has_experts=True), (0.1, 1.0)),
        (bound("fp8"), (0.2, 2.0)),
        (bound("fp8", has_experts=True), (0.4, 4.0)),
        (bound("bfloat16", warn=0.2), (0.2, 2.0)),
        (bound("bfloat16", fail=3.0), (0.05, 3.0)),
        (bound("bfloat16", warn=0.2, fail=0.3), (0.2, 0.3)),
    ],
)
def test_bounds_follow_the_dtype_unless_they_are_set(found: LogprobBound, expected: tuple[float, float]):
    assert (found.warn, found.fail) == pytest.approx(expected)


def test_truncated_sampling_and_other_weights_are_beyond_the_bound_of_float32():
    """Measured: equal weights 4e-7, top_p, top_k and min_p 0.02 to 0.07, other weights 5.3."""
    assert bound().warn > 4e-7 and bound().fail < 0.02
    assert bound("bfloat16", has_experts=True).fail < 5.3


def test_a_run_warns_once(caplog: pytest.LogCaptureFixture):
    limits = bound("bfloat16")
    with caplog.at_level(logging.WARNING):
        for difference in (None, 0.05, 0.06, 0.3):
            limits.report(difference)
    (said,) = caplog.messages
    assert said.startswith("trainer.logprob_difference.warn is 0.05: ") and "differ by 0.06 nats" in said
    assert "above 0.5 the run ends" in said


def test_the_error_names_the_key_both_values_and_the_causes():
    text = str(bound("bfloat16").error(5.31, 7))
    assert text.startswith("trainer.logprob_difference.fail is 0.5: ")
    for part in ("5.31 nats", "version 7", "bfloat16: up to 0.05", "was not trained", "other weights", "temperature"):
        assert part in text


def sample(policy_version: int, trained: int) -> Sample:
    return Sample(
        token_ids=torch.arange(6),
        loss_mask=torch.arange(6) < trained,
        rollout_logprobs=torch.zeros(6),
        prompt_length=1,
        rewards=torch.zeros(6, dtype=torch.float64),
        stop_reason="stop",
        turns=1,
        policy_version=policy_version,
    )


def test_samples_of_earlier_and_unknown_versions_are_not_compared():
    prompt = Prompt("0", [], "addition", {}, "sums")
    groups = [
        Group(prompt, (sample(4, 3), sample(3, 1))),
        Group(prompt, (sample(UNKNOWN_VERSION, 2), sample(4, 0))),
    ]
    assert is_compared(groups, 4).tolist() == [True, False, False, True]
    assert compared_share(groups, 4) == 0.5 and compared_share(groups[:0], 4) == 0.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], False), (["rank=4"], False), (["rank=4", "dropout=0.1"], True), (["dropout=0.1"], False)],
)
def test_old_logprobs_are_kept_where_dropout_makes_the_update_another_model(overrides: list[str], expected: bool):
    """The update's own pass would be off by the dropout's noise, as no engine is."""
    kept: list[Any] = []

    async def keep_old_logprobs(*args: Any) -> dict[str, Any]:
        kept.append(args)
        return {}

    async def for_training() -> None:
        """Nothing moves."""

    trainer = load_config([f"trainer.policy.model.lora.{override}" for override in overrides]).trainer
    policy: Any = SimpleNamespace(keep_old_logprobs=keep_old_logprobs)
    residency: Any = SimpleNamespace(for_training=for_training)
    shards: Any = SimpleNamespace(batches=[SimpleNamespace(mini_batches=[None])])
    signals = asyncio.run(Scorers(trainer, policy, (), residency).score_with_policy(shards, {}))
    assert signals.has_old_logprobs is expected is bool(kept)
    for_selections = asyncio.run(
        Scorers(trainer, policy, (), residency, has_selections=True).score_with_policy(shards, {})
    )
    assert for_selections.has_old_logprobs


@pytest.mark.parametrize(("method", "expected"), [("recompute", True), ("loglinear", False)])
def test_several_mini_batches_cost_a_forward_pass_unless_old_logprobs_are_interpolated(method: str, expected: bool):
    calls: list[Any] = []

    async def call(*args: Any) -> dict[str, Any]:
        calls.append(args)
        return {}

    trainer = load_config([f"trainer.algorithm.prox_logp_method={method}"]).trainer
    actors: Any = SimpleNamespace(keep_old_logprobs=call, for_training=lambda: asyncio.sleep(0))
    shards: Any = SimpleNamespace(batches=[SimpleNamespace(mini_batches=[None, None])])
    signals = asyncio.run(Scorers(trainer, actors, (), actors).score_with_policy(shards, {}))
    assert signals.has_old_logprobs is expected is bool(calls)


def test_a_refused_update_leaves_the_driver_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """A service continues with the same processes, and no version is spent."""
    rank = FakeRank()
    reports = [
        UpdateReport({}, logprob_difference=0.7, is_refused=True),
        UpdateReport({"loss": 1.0}, logprob_difference=0.01),
    ]
    rank.answers["call"] = lambda method, *args, **kwargs: reports.pop(0)
    shards: Any = SimpleNamespace(refs=[None], batches=[SimpleNamespace(mini_batches=[None])])

    async def main() -> None:
        policy = await policy_group(monkeypatch, rank)
        with pytest.raises(UpdateRefused) as error:
            await policy.update(shards, {}, 1)
        assert error.value.difference == 0.7
        assert (policy.num_updates, policy.policy_version, policy.num_steps) == (0, 0, 0)
        _, totals = await policy.update(shards, {}, 1)
        assert totals.logprob_difference == 0.01
        assert (policy.num_updates, policy.policy_version, policy.num_steps) == (1, 1, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("steps_of_ranks", "can_be_saved"),
    [
        ([4, 4], True),
        ([4, 5], False),  # the other rank has begun an optimizer step
        ([5, 5], False),  # an earlier mini-batch was trained
        ([4, None], False),  # the other rank waits in a collective
    ],
)
def test_a_rank_that_raises_costs_only_the_step_where_no_rank_has_begun_an_optimizer_step(
    steps_of_ranks: list[int | None], can_be_saved: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_train.cluster.ranks.model_group.IDLE_S", 0.1)
    ranks = [FakeRank() for _ in steps_of_ranks]
    for rank, steps in zip(ranks, steps_of_ranks, strict=True):
        rank.answers["update"] = lambda *args, **kwargs: 1 / 0
        rank.answers["steps_begun"] = Future() if steps is None else steps
    shards: Any = SimpleNamespace(refs=[None], batches=[SimpleNamespace(mini_batches=[None])])

    async def main() -> None:
        policy = await policy_group(monkeypatch, *ranks)
        policy.num_steps = 4
        with pytest.raises(RemoteFailed, match="policy-0 failed to run update: ZeroDivisionError") as error:
            await policy.update(shards, {}, 1)
        assert isinstance(error.value, NoStepTaken) == can_be_saved
        assert (policy.num_updates, policy.num_steps) == (1, 4), "a service restarts it"

    asyncio.run(main())
