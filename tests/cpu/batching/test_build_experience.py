import math
from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.advantages.groups import grpo
from skyrl_train.algorithms.credit import advantages
from skyrl_train.batching.build import build_experience, credit_inputs, credit_metrics
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample, final_reward


def sample(length, reward, prompt_length=1):
    return Sample(
        token_ids=torch.arange(length) + 100 * length,
        loss_mask=torch.arange(length) >= prompt_length,
        rollout_logprobs=-torch.arange(length, dtype=torch.float32),
        prompt_length=prompt_length,
        rewards=final_reward(length, reward),
        stop_reason="stop",
        turns=1,
        policy_version=0,
    )


def group(uid, *samples):
    prompt = Prompt(uid=uid, messages=[], env_class="gsm8k", extras={}, data_source="test")
    return Group(prompt=prompt, samples=samples)


GROUPS = [
    group("a", sample(3, 1.0), sample(2, 0.0)),
    group("b", sample(4, 2.0)),
    group("c", sample(2, 5.0), sample(2, 5.0)),
]


def test_samples_lie_end_to_end_in_order():
    experience = build_experience(GROUPS, policy_version=0)
    assert experience.token_ids.tolist() == [300, 301, 302, 200, 201, 400, 401, 402, 403, 200, 201, 200, 201]
    assert experience.cu_seqlens.tolist() == [0, 3, 5, 9, 11, 13] and experience.cu_seqlens.dtype == torch.int32
    assert experience.loss_mask.tolist() == [bool(b) for b in [0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1]]
    assert experience.rollout_logprobs.tolist() == [0, -1, -2, 0, -1, 0, -1, -2, -3, 0, -1, 0, -1]
    assert experience.group_ids.tolist() == [0, 0, 1, 2, 2]
    assert experience.rewards.tolist() == [0, 0, 1.0, 0, 0.0, 0, 0, 0, 2.0, 0, 5.0, 0, 5.0]


def metrics_of(groups):
    experience = build_experience(groups, policy_version=0)
    inputs = credit_inputs(experience)
    return credit_metrics(inputs, advantages(grpo, inputs, {"grpo_norm_by_std": False}), experience)


def test_a_kl_penalty_comes_off_the_rewards_of_the_tokens_that_the_policy_wrote():
    experience = build_experience(GROUPS[:1], policy_version=0)
    inputs = credit_inputs(experience, torch.tensor([9.0, 2.0, 4.0, 9.0, -2.0]), 0.25)
    assert inputs.rewards.tolist() == [0.0, -0.5, 0.0, 0.0, 0.5]
    assert advantages(grpo, inputs, {"grpo_norm_by_std": False}).tolist() == [-0.5] * 3 + [0.5] * 2
    assert experience.rewards.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_staleness_is_that_of_each_token_and_unknown_where_nobody_knows():
    fields = {name: getattr(sample(4, 0.0), name) for name in Sample.__dataclass_fields__}
    spans, whole, unknown = (
        Sample(**fields | changes)
        for changes in (
            {"policy_version": 3, "version_spans": ((3, 1), (5, 2))},
            {"policy_version": 4},
            {"policy_version": UNKNOWN_VERSION},
        )
    )
    experience = build_experience([group("a", spans, whole, unknown)], policy_version=5)
    assert experience.staleness.tolist() == [-1, 2, 0, 0, -1, 1, 1, 1, -1, -1, -1, -1]


def test_metrics_weigh_advantages_by_tokens_and_rewards_by_samples():
    # 8 trained tokens: 2 of advantage 0.5, 1 of -0.5, 5 of 0; the second and third group have equal rewards.
    assert metrics_of(GROUPS) == {
        "loss/avg_final_rewards": pytest.approx(2.6),
        "loss/avg_raw_advantages": pytest.approx(0.0625),
        "loss/avg_raw_advantages_abs": pytest.approx(0.1875),
        "reward/zero_variance_share": pytest.approx(2 / 3),
    }


def test_metrics_of_an_experience_without_trained_tokens_are_zero():
    metrics = metrics_of([group("a", sample(2, 1.0, 2), sample(2, 0.0, 2))])
    assert metrics["loss/avg_raw_advantages"] == metrics["loss/avg_raw_advantages_abs"] == 0.0


def test_logprobs_of_tokens_that_were_not_written_are_zero_whatever_the_rollout_gave():
    """NaN there, times a weight of 0, would be NaN in the gradient of every token."""
    given = replace(sample(3, 1.0), rollout_logprobs=torch.tensor([math.nan, -1.0, -math.inf]))
    masked = replace(given, loss_mask=torch.tensor([False, True, False]))
    assert build_experience([group("a", masked)], policy_version=0).rollout_logprobs.tolist() == [0.0, -1.0, 0.0]


def test_no_groups_are_refused():
    with pytest.raises(ValueError, match="no groups"):
        build_experience([], policy_version=0)


def test_each_fault_is_named_with_its_prompt():
    broken = sample(3, 1.0)
    broken = Sample(**{f: getattr(broken, f) for f in Sample.__dataclass_fields__} | {"loss_mask": torch.ones(2) > 0})
    groups = [group("a", sample(2, math.nan)), group("b"), group("c", sample(2, 0.0), broken)]
    with pytest.raises(ValueError) as error:
        build_experience(groups, policy_version=0)
    assert "sample 0 of prompt a has reward nan" in str(error.value)
    assert "prompt b has no samples" in str(error.value)
    assert "sample 1 of prompt c has 3 token_ids, 2 loss_mask" in str(error.value)


def test_three_faults_are_named_and_the_others_counted():
    groups = [group(uid, sample(2, math.nan)) for uid in "abcdefg"]
    with pytest.raises(ValueError, match="^these samples cannot be trained: .*; and 4 more$") as error:
        build_experience(groups, policy_version=0)
    assert str(error.value).count("the rollout or environment must return finite rewards") == 3


def test_a_first_token_is_not_trained_because_nothing_predicts_it():
    """It would count in the mean over the tokens, with a term of 0."""
    first = replace(sample(3, 1.0), loss_mask=torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="sample 0 of prompt a has loss_mask True for its first token, which nothing"):
        build_experience([group("a", first)], policy_version=0)


def test_a_field_that_is_no_tensor_is_named():
    wrong = replace(sample(2, 1.0), loss_mask=[0, 1])
    with pytest.raises(ValueError, match=r"sample 0 of prompt a has list \[0, 1\] as loss_mask: it must be a tensor"):
        build_experience([group("a", wrong)], policy_version=0)


def test_a_penalty_in_the_rewards_does_not_hide_groups_of_equal_rewards():
    experience = build_experience([group("a", sample(3, 1.0), sample(2, 1.0))], policy_version=0)
    penalised = credit_inputs(experience, torch.linspace(0, 1, len(experience.token_ids)), 0.1)
    assert penalised.sample_rewards[0] != penalised.sample_rewards[1]
    metrics = credit_metrics(penalised, torch.zeros(len(experience.token_ids)), experience)
    assert metrics["reward/zero_variance_share"] == 1.0


def test_masks_that_are_too_long_and_too_short_do_not_make_up_for_each_other():
    longer = replace(sample(3, 1.0), loss_mask=torch.ones(4) > 0)
    shorter = replace(sample(3, 0.0), loss_mask=torch.ones(2) > 0)
    with pytest.raises(ValueError, match="sample 0 of prompt a has 3 token_ids, 4 loss_mask"):
        build_experience([group("a", longer, shorter)], policy_version=0)
