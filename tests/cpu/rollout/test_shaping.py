"""Penalties, masks and dynamic sampling of finished groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_train.batching.build import build_experience, credit_inputs
from skyrl_train.config import load_config
from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.metrics import rollout_metrics
from skyrl_train.rollout.shaping import Shaping, copies, has_signal, overlong_penalty
from skyrl_train.tracking.transcripts import transcript_of
from skyrl_train.types import Group, Sample
from tests.cpu.rollout.test_source import World
from tests.support.rollouts import prompt, sample

VECTORS = json.loads(Path(__file__, "../../../data/algorithm_vectors.json").resolve().read_text())["vectors"]


def group(*samples: Sample) -> Group:
    return Group(prompt("a"), samples)


def shaped(samples: list[Sample], *overrides: str) -> list[Sample]:
    return list(Shaping(load_config([*overrides]))(group(*samples)).samples)


def cut_off(reward: float) -> Sample:
    return replace(sample(reward), stop_reason="length")


def test_nothing_is_changed_by_default():
    samples = [cut_off(1.0), sample(1.0)]
    assert all(after is before for after, before in zip(shaped(samples), samples, strict=True))


def test_samples_that_were_cut_off_lose_their_reward_or_their_tokens():
    first, second = shaped([cut_off(1.0), sample(1.0)], "generator.zero_reward_on_non_stop=true")
    assert (first.reward, second.reward) == (0.0, 1.0) and first.loss_mask.any()
    first, second = shaped([cut_off(1.0), sample(0.5)], "generator.apply_overlong_filtering=true")
    assert not first.loss_mask.any() and first.reward == 1.0 and second.loss_mask.any()
    metrics = rollout_metrics([group(first, second)])
    assert metrics["generate/min_num_tokens"] == metrics["generate/max_num_tokens"] == 1.0
    assert metrics["generate/share_stopped_by_length"] == 0.5


def test_named_rewards_and_the_greedy_response_are_shaped_too():
    named = replace(cut_off(1.0), named_rewards={"a": 1.0})
    overrides = ["generator.zero_reward_on_non_stop=true", "trainer.algorithm.overlong_buffer.len=1"]
    config = load_config([*overrides, "generator.sampling_params.max_generate_length=1"])
    made = Shaping(config)(Group(prompt("a"), (named, sample(1.0)), (cut_off(1.0),)))
    assert made.samples[0].named_rewards == {"a": 0.0, "overlong": -1.0} and made.samples[0].reward == -1.0
    assert made.samples[1].named_rewards == {} and made.greedy[0].reward == -1.0


def test_rewards_of_whole_numbers_are_penalised_by_parts_of_one():
    whole = replace(cut_off(1.0), rewards=cut_off(1.0).rewards.int())
    keys = ["trainer.algorithm.overlong_buffer.len=1", "trainer.algorithm.overlong_buffer.penalty_factor=0.5"]
    (made,) = shaped([whole], *keys, "generator.sampling_params.max_generate_length=1")
    assert made.reward == 0.5


def test_a_conversation_with_named_rewards_has_a_named_penalty_also_where_it_is_short_or_its_last_turn_has_no_name():
    """Else the reward would come and go from step to step."""
    keys = ["trainer.algorithm.overlong_buffer.len=1", "generator.sampling_params.max_generate_length=2"]
    first = replace(sample(1.0), named_rewards={"a": 1.0}, ends_conversation=False)
    after = shaped([first, sample(0.0), replace(sample(1.0), named_rewards={"a": 1.0})], *keys)
    assert [one.named_rewards for one in after] == [{"a": 1.0}, {"overlong": -1.0}, {"a": 1.0, "overlong": 0.0}]


def test_rewards_that_differ_by_the_order_in_which_turns_add_up_are_no_signal():
    turns = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    made = [replace(sample(0.0), rewards=rewards) for rewards in (turns, turns.flip(0))]
    assert made[0].reward != made[1].reward and not has_signal(group(*made))


def test_equal_samples_that_differ_from_their_greedy_response_are_trained_by_remax():
    shaping = Shaping(load_config(["trainer.algorithm.zero_variance_filter=true"]))
    better, equal = (Group(prompt("a"), (sample(1.0), sample(1.0)), (sample(reward),)) for reward in (0.0, 1.0))
    assert has_signal(better) and not has_signal(equal)
    assert all(one.loss_mask.any() for one in shaping(better).samples)
    assert not any(one.loss_mask.any() for one in shaping(equal).samples)


def test_a_masked_sample_still_counts_in_its_groups_baseline():
    samples = shaped([cut_off(1.0), sample(0.0)], "generator.apply_overlong_filtering=true")
    inputs = credit_inputs(build_experience([group(*samples)], 0))
    assert inputs.sample_sums(inputs.rewards).tolist() == [1.0, 0.0] and inputs.loss_mask.sum() == 1


@pytest.mark.parametrize("key", ["trainer.algorithm.zero_variance_filter", "generator.apply_overlong_filtering"])
def test_masked_conversations_count_the_tokens_that_the_policy_wrote_and_not_the_environments(key: str):
    one = replace(
        cut_off(1.0),
        token_ids=torch.arange(9),
        loss_mask=torch.tensor([False] * 2 + [True] * 2 + [False] * 4 + [True]),  # prompt, call, result, answer
        prompt_length=2,
        version_spans=((0, 3),),
    )
    samples = shaped([one, one], f"{key}=true")
    assert not samples[0].loss_mask.any()
    assert rollout_metrics([group(*samples)])["generate/avg_num_tokens"] == 3.0
    assert transcript_of(1, samples[0]).num_tokens == 3


def test_a_group_without_signal_can_be_masked():
    key = "trainer.algorithm.zero_variance_filter=true"
    assert not any(one.loss_mask.any() for one in shaped([sample(1.0), sample(1.0)], key))
    assert all(one.loss_mask.any() for one in shaped([sample(1.0), sample(0.0)], key))
    assert shaped([sample(1.0)], key)[0].loss_mask.any(), "a group of one has nothing to differ from"


@pytest.mark.parametrize(
    "record", [one for one in VECTORS if one["method"] == "overlong_soft_punishment"], ids=lambda one: one["peer"]
)
def test_the_overlong_penalty_is_that_of_its_peers(record):
    for case in record["cases"]:
        inputs, outputs = case["inputs"], case["outputs"]
        limit = record["parameters"]["max_response_length"]
        factor, buffer = record["parameters"]["penalty_factor"], record["parameters"]["buffer_length"]
        for length, reward, after in zip(inputs["lengths"], inputs["rewards"], outputs["rewards"], strict=True):
            if length > limit and record["peer"] != "openrlhf":
                continue  # the others' penalty keeps growing beyond the limit, which no response exceeds
            assert reward - overlong_penalty(length, limit, buffer, factor) == pytest.approx(after)


SIGNAL_DIFFERS = {
    ("skyrl_v04", "c"): "the standard deviation of equal rewards is rounded to more than 0 there",
    ("skyrl", "a"): "samples without a trained token do not count there",
    ("skyrl", "b"): "rewards within 1e-6 are equal there",
    ("skyrl", "x"): "samples without a trained token do not count there",
    ("slime", "b"): "rewards within 1e-6 are equal there",
}


@pytest.mark.parametrize(
    "record", [one for one in VECTORS if one["method"] == "zero_variance_filter"], ids=lambda one: one["peer"]
)
def test_groups_without_signal_are_those_of_its_peers(record):
    for case in record["cases"]:
        rewards, uids, outputs = case["inputs"]["rewards"], case["inputs"]["uids"], case["outputs"]
        kept = outputs.get("kept_groups", {uids[index] for index in outputs.get("kept", ())})
        for uid in sorted(set(uids)):
            samples = [sample(reward) for reward, owner in zip(rewards, uids, strict=True) if owner == uid]
            if len(samples) > 1 and (has_signal(group(*samples)) != (uid in kept)):
                assert (record["peer"], uid) in SIGNAL_DIFFERS


def test_the_penalty_is_taken_off_the_last_token():
    long = replace(sample(1.0), rewards=torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64))
    keys = ["trainer.algorithm.overlong_buffer.len=2", "trainer.algorithm.overlong_buffer.penalty_factor=0.5"]
    (after,) = shaped([long], *keys, "generator.sampling_params.max_generate_length=2")
    assert after.rewards.tolist() == [0.0, 0.5, 0.25], "one of two tokens of the buffer, half of 0.5"
    assert long.rewards.tolist() == [0.0, 0.5, 0.5]


def test_filtering_samples_others_one_for_one_until_every_group_has_signal():
    (rows,) = World().steps(1)
    kept = {rows[1], rows[3]}
    world = World(
        "trainer.algorithm.dynamic_sampling.type=filter",
        rewards=lambda uid, number: float(number) if uid in kept or uid not in rows else 1.0,
    )
    (step,) = world.steps(1)
    assert step[:2] == [rows[1], rows[3]] and len(set(step)) == 4 and not set(step[2:]) & set(rows)
    assert world.source.metrics() == {"trainer/epoch": 0.0, "generate/num_filtered_groups": 2.0}
    assert world.source._admission.ledger == Ledger(generated=6, trained=4, filtered=2)


def test_sampling_without_an_end_stops_at_the_limit():
    overrides = [
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.algorithm.dynamic_sampling.max_sample_batches=2",
    ]
    with pytest.raises(RuntimeError, match="max_sample_batches=2 rounds only 0 of 4 groups have samples of different"):
        World(*overrides).steps(1)


def test_replacing_copies_good_groups_where_there_are_enough():
    (rows,) = World().steps(1)
    overrides = [
        "trainer.algorithm.dynamic_sampling.type=replace",
        "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.4",
    ]
    world = World(*overrides, rewards=lambda uid, n: float(n) if uid in rows[:2] else 1.0)
    (step,) = world.steps(1)
    assert step[:2] == rows[:2] and sorted(step[2:]) == sorted(rows[:2]), "each copied once"
    assert world.source._admission.ledger == Ledger(generated=4, trained=2, filtered=2)
    assert World(*overrides, rewards=world.rewards).steps(1) == [step], "the choice is the run's"


def test_copies_are_spread_evenly_and_decided_by_the_seed():
    groups = [Group(prompt(uid), (sample(1.0), sample(0.0))) for uid in "abc"]
    names = [one.prompt.uid for one in copies(groups, 7, 3)]
    assert sorted(names[:3]) == sorted(names[3:6]) == ["a", "b", "c"]
    assert names == [one.prompt.uid for one in copies(groups, 7, 3)]
    assert all(has_signal(one) for one in groups) and not has_signal(group(sample(1.0), sample(1.0)))
