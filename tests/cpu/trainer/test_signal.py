"""Steps whose groups all have equal rewards, which must not be trained."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.tables import LOSSES
from skyrl_train.batching.build import build_experience
from skyrl_train.cluster.ranks.policy_group import NoStepTaken, UpdateRefused, UpdateReports
from skyrl_train.config import load_config
from skyrl_train.ranks import UpdateReport
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer import scorers as scorers_module
from skyrl_train.trainer import step as step_module
from skyrl_train.trainer.build import learning_signal
from skyrl_train.trainer.credit import CreditAssignment, LearningSignal, explained_variance
from skyrl_train.trainer.from_config import objective
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.trainer.scorers import Scorers
from skyrl_train.trainer.step import TrainingStep
from skyrl_train.types import ExperienceBatch, Group, Metrics, Prompt, Sample, final_reward

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)
WITHOUT_KL = "trainer.algorithm.use_kl_loss=false"


def group(rewards: tuple[float, ...], mask: tuple[bool, ...] = (False, True)) -> Group:
    samples = tuple(
        Sample(torch.tensor([1, 2]), torch.tensor(mask), torch.zeros(2), 1, final_reward(2, reward), "stop", 1, 0)
        for reward in rewards
    )
    return Group(Prompt("0", [], "addition", {}, "sums"), samples)


def metrics_of(*groups: Group) -> Metrics:
    credit = CreditAssignment(load_config().trainer.algorithm)
    return credit(build_experience(groups, policy_version=0)).metrics


def objective_of(*overrides: str) -> Objective:
    config = load_config([WITHOUT_KL, *overrides])
    return objective(config.trainer.algorithm, config.generator.sampling_params)


class Policy:
    """Counts what costs something, and moves its version."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.policy_version = self.num_updates = self.num_steps = 0

    async def keep_old_logprobs(self, shards: Any, ref: Any) -> dict[str, Any]:
        self.calls.append("old logprobs")
        return {}

    async def update(self, *args: Any, **kwargs: Any) -> tuple[Metrics, UpdateReports]:
        self.calls.append("update")
        self.policy_version, self.num_updates = self.policy_version + 1, self.num_updates + 1
        return {"policy/num_optimizer_steps": 2.0}, UpdateReports((UpdateReport({}, 1.0, 0.0, 0.0, 0.0, None),), 0.0)


class Critic:
    """Values of 0.25."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def values(self, batch: ExperienceBatch, num_groups: int, step_id: int) -> torch.Tensor:
        self.calls.append(f"values of step {step_id}")
        return torch.full((len(batch.rewards),), 0.25)

    async def update(self, batch: ExperienceBatch, returns: torch.Tensor) -> Metrics:
        self.calls.append(f"critic learns {returns[batch.loss_mask].tolist()}")
        return {"critic/value_loss": 0.5}


class World:
    """A step whose devices and first comparison only record that they were used."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        always_updates: bool = False,
        objective: Objective | None = None,
    ) -> None:
        self.policy = Policy()
        calls, config, policy = self.policy.calls, load_config([WITHOUT_KL, *overrides]), cast("Any", self.policy)

        def noting(name: str, result: Any = None) -> Any:
            async def call(*args: Any) -> Any:
                calls.append(name)
                return result

            return call

        async def groups() -> list[Group]:
            return self.groups

        bound = SimpleNamespace(fail=1.0, report=lambda difference: None, error=lambda *args: ValueError("differ"))
        sync = noting("sync", SimpleNamespace(num_bytes=1, seconds=1.0, begin_s=0.1, finish_s=0.1))
        residency: Any = SimpleNamespace(
            for_training=noting("for_training"), sync_weights=sync, metrics=lambda: {"timing/moves": 0.0}
        )
        source: Any = SimpleNamespace(next=groups)
        timers = Timers()
        self.step = TrainingStep(
            config=config,
            source=source,
            policy=policy,
            residency=residency,
            scorers=Scorers(config.trainer, policy, (), residency),
            publisher=Publisher(residency, timers),
            first_check=SimpleNamespace(scores=noting("scores"), judge=noting("judge")),  # type: ignore[arg-type]
            logprob_bound=bound,  # type: ignore[arg-type]
            learning_signal=LearningSignal(objective_of(), has_other_terms=always_updates),
            objective=objective or objective_of(),
            limits=SimpleNamespace(),  # type: ignore[arg-type]
            timers=timers,
            vocab_size=64,
            critic=Critic(calls) if config.trainer.algorithm.needs_critic else None,  # type: ignore[arg-type]
        )
        batches = [SimpleNamespace(mini_batches=[None, None])]
        shards = SimpleNamespace(
            batches=batches, step_id=7, put=lambda *args: [], merged=lambda kl, batch: torch.zeros(len(batch.rewards))
        )
        monkeypatch.setattr(step_module, "split", lambda *args, **kwargs: [])
        monkeypatch.setattr(step_module, "Shards", lambda batches: shards)
        monkeypatch.setattr(step_module, "balance_metrics", lambda *args: {})

    async def learn(self, *rewards: tuple[float, ...], mask: tuple[bool, ...] = (False, True)) -> Metrics:
        self.policy.calls.clear()
        self.groups = [group(of_group, mask) for of_group in rewards]
        return await self.step.step()


def test_a_token_beyond_the_vocabulary_is_refused_before_the_update_whatever_source_gave_it(
    monkeypatch: pytest.MonkeyPatch,
):
    world = World(monkeypatch)
    made = group(DIFFERENT)
    first = replace(made.samples[0], token_ids=torch.tensor([1, 64]))
    world.groups = [replace(made, samples=(first, *made.samples[1:]))]
    with pytest.raises(ValueError, match="sample 0 of prompt 0 has token id 64: the policy's vocabulary has 64 tokens"):
        asyncio.run(world.step.step())
    assert world.policy.calls == []


def test_a_step_whose_groups_all_have_equal_rewards_trains_and_syncs_nothing(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world = World(monkeypatch)
        metrics = await world.learn(EQUAL, (0.0, 0.0))
        assert world.policy.calls == [] and world.policy.policy_version == 0
        assert metrics["policy/num_optimizer_steps"] == 0 and metrics["reward/zero_variance_share"] == 1
        assert metrics["loss/avg_final_rewards"] == 0.5
        assert metrics["timing/moves"] == 0

    asyncio.run(main())


def test_the_first_update_after_steps_without_signal_is_checked_like_any_first_update(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world = World(monkeypatch)
        await world.learn(EQUAL)
        await world.learn(EQUAL, DIFFERENT)
        assert world.policy.calls == ["scores", "for_training", "old logprobs", "judge", "update", "sync"]
        assert world.policy.policy_version == 1

    asyncio.run(main())


def test_tokens_count_in_every_epoch_of_an_update(monkeypatch: pytest.MonkeyPatch):
    async def trained(*overrides: str) -> float:
        world = World(monkeypatch, *overrides)
        metrics = await world.learn(DIFFERENT, EQUAL)  # eight tokens
        return metrics["perf/train_tokens_per_s"] * world.step.timers.metrics()["timing/policy_train"]

    assert asyncio.run(trained()) == pytest.approx(8)
    assert asyncio.run(trained("trainer.update_epochs_per_batch=3")) == pytest.approx(24)


def test_the_first_samples_of_older_weights_that_nothing_accounts_for_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def warnings_of(*corrections: str, source: str = "on_policy") -> list[str]:
        caplog.clear()
        world = World(monkeypatch, f"trainer.source={source}", objective=objective_of(*corrections))
        await world.learn(DIFFERENT)
        assert "versions older" not in caplog.text  # the samples are of version 0, like the policy
        await world.learn(DIFFERENT)
        await world.learn(DIFFERENT)
        return [record.getMessage() for record in caplog.records if "versions older" in record.getMessage()]

    (warning,) = asyncio.run(warnings_of())
    assert warning.startswith("100 % of the trained tokens of this step were sampled by weights up to 1 policy version")
    assert "have it return the policy_version" in warning and "max_staleness" not in warning
    (warning,) = asyncio.run(warnings_of(source="mine:Replay"))
    assert "Set trainer.max_staleness to the number of steps" in warning
    assert asyncio.run(warnings_of("trainer.algorithm.corrections=[token_tis]")) == []


async def fails(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("mine")


async def is_refused(*args: Any, **kwargs: Any) -> Any:
    raise UpdateRefused(9.0)


async def raises_in_a_loss(*args: Any, **kwargs: Any) -> Any:
    raise NoStepTaken("policy-0")


@pytest.mark.parametrize(
    ("change", "has_begun"),
    [
        (lambda world: setattr(world.step, "_credit", lambda *args, **kwargs: 1 / 0), False),
        (lambda world: setattr(world.step.first_check, "judge", fails), False),
        (lambda world: setattr(world.policy, "update", is_refused), False),
        (lambda world: setattr(world.policy, "update", raises_in_a_loss), False),
        (lambda world: setattr(world.policy, "update", fails), True),
        (lambda world: setattr(world.step.residency, "sync_weights", fails), True),
    ],
)
def test_a_failed_step_says_whether_the_weights_may_have_changed(
    change: Callable[[World], None], has_begun: bool, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        world = World(monkeypatch)
        await world.learn(DIFFERENT)
        assert world.step.has_begun
        change(world)
        with pytest.raises((ValueError, ZeroDivisionError, NoStepTaken)):
            await world.learn(DIFFERENT)
        assert world.step.has_begun == has_begun

    asyncio.run(main())


def test_a_critic_that_has_learned_counts_even_where_the_policys_update_is_refused(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world = World(monkeypatch, GAE)
        world.policy.update = is_refused  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="differ"):
            await world.learn(DIFFERENT)
        assert world.step.has_begun

    asyncio.run(main())


def test_steps_without_signal_are_logged_less_and_less(caplog: pytest.LogCaptureFixture):
    signal = LearningSignal(objective_of(), has_other_terms=False)
    metrics = [metrics_of(group(rewards)) for rewards in (EQUAL, DIFFERENT) * 9]
    assert [signal.is_in(each) for each in metrics] == [False, True] * 9
    assert re.findall(r"so far: (\d+)", caplog.text) == ["1", "2", "4", "8"]
    assert "100 % of the groups have equal rewards" in caplog.text


def test_advantages_of_tokens_that_are_not_trained_are_no_signal():
    signal = LearningSignal(objective_of(), has_other_terms=False)
    assert not signal.is_in(metrics_of(group(DIFFERENT, mask=(False, False))))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.use_kl_loss=true"],
        ["trainer.algorithm.use_kl_in_reward=true"],
        ["trainer.algorithm.use_entropy_loss=true"],
        ["trainer.algorithm.policy_loss_type=cross_entropy"],
        ["trainer.policy.megatron_config.moe_aux_loss_coeff=0.01"],
    ],
)
def test_an_objective_with_another_term_is_trained_without_advantages(overrides: list[str]):
    config, experts = load_config([WITHOUT_KL, *overrides]), SimpleNamespace(num_experts=4)
    assert learning_signal(config, experts).is_in(metrics_of(group(EQUAL)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0"],
        ["trainer.algorithm.use_entropy_loss=true", "trainer.algorithm.entropy_loss_coef=0"],
        ["trainer.policy.megatron_config.moe_aux_loss_coeff=0.01"],
    ],
)
def test_terms_of_weight_zero_and_routers_of_a_dense_model_are_no_signal(overrides: list[str]):
    config = load_config([WITHOUT_KL, *overrides])
    assert not learning_signal(config, SimpleNamespace()).is_in(metrics_of(group(EQUAL)))  # type: ignore[arg-type]


def test_every_loss_but_cross_entropy_needs_advantages():
    trained = {
        loss
        for loss in LOSSES
        if LearningSignal(objective_of(f"trainer.algorithm.policy_loss_type={loss}"), has_other_terms=False).is_in(
            metrics_of(group(EQUAL))
        )
    }
    assert trained == {"cross_entropy"}


def test_a_step_that_always_updates_trains_without_signal(monkeypatch: pytest.MonkeyPatch):
    """So does a service, whose clients count versions."""

    async def main() -> None:
        world = World(monkeypatch, always_updates=True)
        await world.learn(EQUAL)
        assert world.policy.calls[-2:] == ["update", "sync"] and world.policy.policy_version == 1

    asyncio.run(main())


GAE = "trainer.algorithm.advantage_estimator=gae"
MASKED = (False, False)


@pytest.mark.parametrize(
    ("overrides", "is_trained"),
    [
        (["trainer.algorithm.use_kl_loss=true"], False),
        (["trainer.algorithm.use_kl_in_reward=true"], False),
        (["trainer.algorithm.use_entropy_loss=true"], False),
        ([GAE], False),
        (["trainer.policy.megatron_config.moe_aux_loss_coeff=0.01"], True),
    ],
)
def test_other_terms_have_no_gradient_either_where_no_token_is_trained(overrides: list[str], is_trained: bool):
    signal = learning_signal(load_config([WITHOUT_KL, *overrides]), SimpleNamespace(num_experts=4))  # type: ignore[arg-type]
    assert signal.is_in(metrics_of(group(DIFFERENT, MASKED)), has_tokens=False) is is_trained


@pytest.mark.parametrize("overrides", [[], [GAE]])
def test_a_step_whose_samples_are_all_masked_trains_neither_policy_nor_critic(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def main() -> None:
        world = World(monkeypatch, *overrides)
        world.step.learning_signal = LearningSignal(objective_of(), has_other_terms=True)
        metrics = await world.learn(DIFFERENT, mask=MASKED)
        assert world.policy.calls == [] and metrics["policy/num_optimizer_steps"] == 0
        assert "all its samples are masked" in caplog.text

    asyncio.run(main())


def test_the_critic_learns_before_the_policy_also_where_all_rewards_are_equal(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world = World(monkeypatch, GAE, always_updates=True)
        metrics = await world.learn(EQUAL)
        assert world.policy.calls == [
            *("scores", "values of step 7", "critic learns [1.0, 1.0]"),
            *("for_training", "old logprobs", "judge", "update", "sync"),
        ]
        assert metrics["critic/value_loss"] == 0.5 and metrics["critic/explained_variance"] == 0

    asyncio.run(main())


def test_with_a_penalty_in_the_reward_the_critic_learns_after_the_policys_logprobs(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        world = World(monkeypatch, GAE, "trainer.algorithm.use_kl_in_reward=true", always_updates=True)

        async def score(*args: Any) -> Any:
            return {"ref_logprobs": [None]}

        async def keep_old_logprobs(shards: Any, ref: Any) -> Any:
            world.policy.calls.append("old logprobs")
            return {"kl": [torch.zeros(1)]}

        monkeypatch.setattr(world.step.scorers, "score", score)
        monkeypatch.setattr(world.policy, "keep_old_logprobs", keep_old_logprobs)
        await world.learn(DIFFERENT)
        assert world.policy.calls == [
            *("scores", "values of step 7", "for_training", "old logprobs", "judge"),
            *("critic learns [0.0, 1.0]", "for_training", "update", "sync"),
        ]

    asyncio.run(main())


def test_explained_variance_is_one_for_the_returns_and_zero_for_their_mean():
    returns, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((3,), 2.0), returns, mask) == 0
    assert explained_variance(torch.tensor([1.0, 2.0, 0.0]), returns, mask) == 0.75
    assert explained_variance(returns, returns, ~mask) == 0


def test_residency_sees_one_critic_so_that_it_stays_between_its_values_and_its_update():
    async def main() -> None:
        seen: list[Any] = []

        async def for_scoring(scorer: Any) -> None:
            seen.append(scorer)

        config, model = load_config([GAE]), SimpleNamespace(max_position_embeddings=64)
        group, residency = SimpleNamespace(dp_size=1), SimpleNamespace(for_scoring=for_scoring)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scorers_module, "micro_batch_limits", lambda *args: None)
            critic = scorers_module.Critic(config, cast("Any", model), cast("Any", group), cast("Any", residency))
        await critic.load()
        await critic.load()
        assert seen[0] is seen[1] and seen[0].model is group and seen[0].name == "critic"

    asyncio.run(main())


def test_an_adaptive_term_whose_weight_has_become_zero_is_no_signal():
    objective = objective_of("trainer.algorithm.use_entropy_loss=true")
    policy, entropy = objective.terms
    without = replace(objective, terms=(policy, replace(entropy, coef=0.0)))
    signal = LearningSignal(objective, has_other_terms=False)
    assert signal.is_in(metrics_of(group(EQUAL)), objective)
    assert not signal.is_in(metrics_of(group(EQUAL)), without)
    assert signal.is_in(metrics_of(group(DIFFERENT)), without)


def test_a_penalty_that_is_not_finite_is_not_blamed_on_the_estimator():
    algorithm = load_config(["trainer.algorithm.use_kl_in_reward=true"]).trainer.algorithm
    experience = build_experience([group(DIFFERENT)], policy_version=0)
    kl = torch.zeros(len(experience.token_ids))
    kl[1] = torch.nan
    with pytest.raises(ValueError, match=r"trainer.ref: not finite at 1 of \d+ tokens, because logprobs of the policy"):
        CreditAssignment(algorithm)(experience, kl, kl_coef=0.1)
