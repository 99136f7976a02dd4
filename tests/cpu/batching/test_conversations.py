"""Conversations that are trained as several samples: credit, filters and metrics count conversations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.build import build_estimator
from skyrl_train.algorithms.credit import assign_credit
from skyrl_train.algorithms.tables import ADVANTAGES
from skyrl_train.batching.build import build_experience, credit_inputs, credit_metrics
from skyrl_train.config import load_config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.rollout.metrics import evaluation_metrics, rollout_metrics
from skyrl_train.rollout.shaping import Shaping, has_signal
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.types import Group, Prompt, Sample, final_reward

PROMPT = Prompt("0", [], "addition", {}, "sums")


def turn(reward: float, *, length: int = 3, written: int = 2, ends: bool = False, **changes: object) -> Sample:
    """A sample whose last `written` tokens are the policy's."""
    sample = Sample(
        token_ids=torch.arange(length),
        loss_mask=torch.arange(length) >= length - written,
        rollout_logprobs=torch.full((length,), -0.5),
        prompt_length=length - written,
        rewards=final_reward(length, reward),
        stop_reason="stop",
        turns=1,
        policy_version=0,
        ends_conversation=ends,
    )
    return replace(sample, **changes)


def credit(groups: list[Group], *overrides: str) -> torch.Tensor:
    algorithm = load_config([*overrides]).trainer.algorithm
    return CreditAssignment(algorithm)(build_experience(groups, 0)).advantages


SUCCESS = (turn(0.0, length=4), turn(0.0, length=5, written=3), turn(1.0, ends=True))
FAILURE = (turn(0.0, ends=True),)


def test_grpo_compares_conversations_and_credits_all_turns_of_one():
    """Rewards 1 and 0: mean 1/2, sample standard deviation sqrt(1/2). Over the four samples the mean would be 1/4."""
    found = credit([Group(PROMPT, (*SUCCESS, *FAILURE))], "trainer.algorithm.advantage_estimator=grpo")
    expected = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(found, torch.tensor([expected] * 12 + [-expected] * 3))


def test_rloo_leaves_out_conversations_not_turns():
    """Rewards 1, 0 and 0.5 (two turns of 0.25): each minus the mean of the other two."""
    half = (turn(0.25), turn(0.25, ends=True))
    found = credit([Group(PROMPT, (*SUCCESS, *FAILURE, *half))], "trainer.algorithm.advantage_estimator=rloo")
    torch.testing.assert_close(found, torch.tensor([0.75] * 12 + [-0.75] * 3 + [0.0] * 6))


def test_the_return_of_a_token_crosses_the_turns_of_its_conversation():
    """gamma 1/2 for each written token that follows: 1, 1/2, 1/4, ... from the end of the last turn back to the first;
    then whitened over the 9 written tokens."""
    found = credit(
        [Group(PROMPT, (*SUCCESS, *FAILURE))],
        "trainer.algorithm.advantage_estimator=reinforce++", "trainer.algorithm.gamma=0.5",
    )  # fmt: skip
    returns = torch.tensor([0.5**6, 0.5**5, 0.5**4, 0.5**3, 0.5**2, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)
    mask = torch.cat([sample.loss_mask for sample in (*SUCCESS, *FAILURE)])
    torch.testing.assert_close(found[mask].double(), (returns - returns.mean()) / (returns.var() + 1e-8).sqrt())


def joined(conversation: list[Sample]) -> Sample:
    """The same tokens as one sample."""
    return replace(
        conversation[-1],
        **{
            name: torch.cat([getattr(sample, name) for sample in conversation])
            for name in ("token_ids", "loss_mask", "rollout_logprobs", "rewards")
        },
        turns=len(conversation),
        named_rewards={"a": sum(sample.named_rewards["a"] for sample in conversation)},
    )


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_every_estimator_credits_a_conversation_as_if_it_were_one_sample(estimator):
    rewards = [[0.0, 0.5, 1.0], [0.25], [0.0, -1.0], [0.5, 0.5]]
    conversations = [
        [turn(r, length=3 + i, ends=i == len(some) - 1, named_rewards={"a": r}) for i, r in enumerate(some)]
        for some in rewards
    ]
    greedy = (turn(0.5, ends=True),)
    groups = [
        Group(PROMPT, tuple(sample for some in part for sample in some), greedy)
        for part in (conversations[:2], conversations[2:])
    ]
    whole = [
        Group(PROMPT, tuple(map(joined, group.conversations)), greedy) for group in groups
    ]  # independent of ends_conversation
    assert [group.rewards for group in groups] == [[1.5, 0.25], [-1.0, 1.0]]
    algorithm: AlgorithmConfig = load_config([f"trainer.algorithm.advantage_estimator={estimator}"]).trainer.algorithm
    bound = build_estimator(algorithm.values)
    values = torch.linspace(-1, 1, sum(len(sample.token_ids) for group in groups for sample in group.samples))
    of_turns, of_whole = (
        assign_credit(bound.function, credit_inputs(build_experience(some, 0), values=values), bound.parameters)
        for some in (groups, whole)
    )
    assert of_turns.advantages.any() or estimator == "zero"
    torch.testing.assert_close(of_turns.advantages, of_whole.advantages)


def test_metrics_of_credit_count_conversations():
    experience = build_experience([Group(PROMPT, (*SUCCESS, *FAILURE)), Group(PROMPT, SUCCESS * 2)], 0)
    metrics = credit_metrics(credit_inputs(experience), torch.ones(len(experience.token_ids)), experience)
    assert metrics["loss/avg_final_rewards"] == 0.75  # 1, 0, 1, 1
    assert metrics["reward/zero_variance_share"] == 0.5


def test_a_conversation_without_an_end_is_an_error_that_names_its_prompt():
    with pytest.raises(ValueError, match="last sample of prompt 0 has ends_conversation=False"):
        build_experience([Group(PROMPT, SUCCESS[:2])], 0)


def test_metrics_of_a_step_count_conversations():
    groups = [Group(PROMPT, (*SUCCESS, *FAILURE)), Group(PROMPT, (*FAILURE, *FAILURE))]
    metrics = rollout_metrics(groups)
    assert metrics["generate/batch_num_seq"] == 6  # training samples
    assert metrics["generate/avg_turns"] == (3 + 1 + 1 + 1) / 4
    assert metrics["generate/avg_num_tokens"] == (7 + 2 + 2 + 2) / 4
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 7
    assert metrics["reward/avg_raw_reward"] == 0.25
    assert metrics["reward/avg_pass_at_2"] == 0.5
    assert not [name for name in metrics if name.endswith(("pass_at_4", "pass_at_6"))]
    evaluated = evaluation_metrics(groups)
    assert (evaluated["eval/all/avg_score"], evaluated["eval/all/pass_at_2"]) == (0.25, 0.5)


def test_named_rewards_of_turns_are_added_up():
    group = Group(
        PROMPT, (turn(0.0, named_rewards={"a": 1.0}), turn(0.0, ends=True, named_rewards={"a": 2.0, "b": 4.0}))
    )
    metrics = rollout_metrics([group])
    assert (metrics["reward/named/a"], metrics["reward/named/b"]) == (3.0, 4.0)
    assert credit_inputs(build_experience([group], 0)).named_rewards["a"].tolist() == [3.0]


def test_a_group_has_signal_if_its_conversations_differ():
    halves = (turn(0.5), turn(0.5, ends=True))
    assert not has_signal(Group(PROMPT, (*SUCCESS, *halves)))  # 1 and 1
    assert has_signal(Group(PROMPT, (*SUCCESS, *FAILURE)))
    assert has_signal(Group(PROMPT, SUCCESS))  # one conversation


def test_a_conversation_that_was_cut_off_loses_the_rewards_or_tokens_of_all_turns():
    cut = (turn(0.5), turn(0.5, ends=True, stop_reason="length"))
    zeroed = Shaping(load_config(["generator.zero_reward_on_non_stop=true"]))(Group(PROMPT, (*cut, *SUCCESS)))
    assert zeroed.rewards == [0.0, 1.0]
    masked = Shaping(load_config(["generator.apply_overlong_filtering=true"]))(Group(PROMPT, (*cut, *SUCCESS)))
    assert [bool(sample.loss_mask.any()) for sample in masked.samples] == [False, False, True, True, True]
    assert masked.rewards == [1.0, 1.0]


def test_the_penalty_for_length_counts_all_turns_and_is_earned_by_the_last_token():
    shaping = Shaping(
        load_config(
            [
                "generator.sampling_params.max_generate_length=8",
                "trainer.algorithm.overlong_buffer.len=4",
                "trainer.algorithm.overlong_buffer.penalty_factor=1.0",
            ]
        )
    )
    shaped = shaping(Group(PROMPT, (*SUCCESS, *FAILURE)))  # 7 and 2 tokens: (7 - 4) / 4 over the limit
    assert shaped.rewards == [0.25, 0.0]
    assert shaped.samples[2].rewards[-1] == 0.25
