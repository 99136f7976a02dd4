"""Outputs of skyrl_train 0.4's generators as samples: every token, logprob and reward where the generator put it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.batching.build import build_experience, credit_inputs
from skyrl_train.compat.generators.outputs import conversations_of, input_of, output_of, vllm_params, with_output
from skyrl_train.compat.generators.types import BatchMetadata, GeneratorOutput, TrajectoryID
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample, SamplingParams
from tests.support.rollouts import sample
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPT = Prompt("7", [{"role": "user", "content": "1+1="}], "addition", {"level": [3]}, "sums")
PARAMS = SamplingParams(max_generate_length=5, temperature=0.7, stop=("!",))


def output(**changes: Any) -> GeneratorOutput:
    """Two samples of two and three tokens; the second has a token of the environment in its middle."""
    given: dict[str, Any] = {
        "prompt_token_ids": [[1, 2], [3]],
        "response_ids": [[4, 5], [6, 7, 8]],
        "rewards": [1.0, -0.5],
        "loss_masks": [[1, 1], [1, 0, 1]],
        "stop_reasons": ["stop", "length"],
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.25, -0.5], [-1.0, 0.0, -2.0]],
    }
    return GeneratorOutput(**(given | changes))  # type: ignore[typeddict-item]


def samples_of(given: GeneratorOutput, n_samples: int = 2) -> list[Sample]:
    return [sample for made in conversations_of(given, PROMPT, n_samples, 5, TOKENIZER) for sample in made]


def test_an_output_becomes_samples_in_its_order_with_every_value_at_its_token():
    first, second = samples_of(output())
    assert first.token_ids.tolist() == [1, 2, 4, 5] and first.prompt_length == 2
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_logprobs.tolist() == [0.0, 0.0, -0.25, -0.5]
    assert first.rewards.tolist() == [0.0, 0.0, 0.0, 1.0] and first.reward == 1.0
    assert (first.stop_reason, first.turns, first.policy_version) == ("stop", 1, 5)
    assert second.token_ids.tolist() == [3, 6, 7, 8] and second.prompt_length == 1
    assert second.loss_mask.tolist() == [False, True, False, True]
    assert second.rollout_logprobs.tolist() == [0.0, -1.0, 0.0, -2.0]
    assert second.rewards.tolist() == [0.0, 0.0, 0.0, -0.5]
    assert (second.stop_reason, second.turns, second.ends_conversation) == ("length", 2, True)
    assert first.transcript == [*PROMPT.messages, {"role": "assistant", "content": TOKENIZER.decode([4, 5])}]


@pytest.mark.parametrize(
    ("given", "read"),
    [("stop", "stop"), ("complete", "stop"), (None, "stop"), ("abort", "length"), ("agent_timeout", "length")],
)
def test_every_stop_reason_but_an_end_is_that_of_an_unfinished_sample(given: str | None, read: str):
    assert [each.stop_reason for each in samples_of(output(stop_reasons=[given, "stop"]))] == [read, "stop"]


def test_rewards_per_token_stay_at_their_tokens():
    first, second = samples_of(output(rewards=[[0.0, 1.0], [0.25, 0.0, 0.5]]))
    assert first.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert second.rewards.tolist() == [0.0, 0.25, 0.0, 0.5]


def test_logprobs_of_tokens_that_are_not_trained_do_not_count():
    (_, second) = samples_of(output(rollout_logprobs=[[-0.25, -0.5], [-1.0, -9.0, -2.0]]))
    assert second.rollout_logprobs.tolist() == [0.0, -1.0, 0.0, -2.0]


def test_missing_logprobs_are_nan_and_their_tokens_have_no_staleness():
    made = samples_of(output(rollout_logprobs=None, stop_reasons=None))
    assert all(each.policy_version == UNKNOWN_VERSION and each.stop_reason == "stop" for each in made)
    assert [math.isnan(value) for value in made[1].rollout_logprobs] == [False, True, False, True]
    assert build_experience([Group(PROMPT, tuple(made))], 9).staleness.tolist() == [-1] * 8
    known = build_experience([Group(PROMPT, tuple(samples_of(output())))], 9)
    assert known.staleness.tolist() == [-1, -1, 4, 4, -1, 4, -1, 4], "version 5 of 9"


def test_steps_of_a_trajectory_share_the_credit_of_their_rewards():
    ids = [TrajectoryID("7", 0), TrajectoryID("7", 0), TrajectoryID("7", 1)]
    given = output(
        prompt_token_ids=[[1], [1, 4, 2], [1]],
        response_ids=[[4], [5, 6], [7, 8]],
        rewards=[0.5, 1.0, 0.0],
        loss_masks=[[1], [1, 1], [1, 1]],
        stop_reasons=["stop"] * 3,
        rollout_logprobs=[[-1.0], [-1.0, -1.0], [-1.0, -1.0]],
        trajectory_ids=ids,
        is_last_step=[False, True, True],
    )
    conversations = conversations_of(given, PROMPT, 2, 0, TOKENIZER)
    assert [len(made) for made in conversations] == [2, 1]
    group = Group(PROMPT, tuple(sample for made in conversations for sample in made))
    assert [each.ends_conversation for each in group.samples] == [False, True, True]
    assert group.rewards == [1.5, 0.0]
    assert credit_inputs(build_experience([group], 0)).cu_seqlens.tolist() == [0, 7, 10]
    again = output_of(group)
    assert again["trajectory_ids"] == ids and again["is_last_step"] == [False, True, True]


def test_placeholders_are_no_samples():
    """A single token that is not trained, as generators of 0.4 return for a trajectory that failed."""
    first, failed = [[1, 2], [0]], [[4, 5], [0]]
    (kept,) = samples_of(
        output(
            prompt_token_ids=first,
            response_ids=failed,
            loss_masks=[[1, 1], [0]],
            rollout_logprobs=None,
            rewards=[1.0, 0.0],
        )
    )
    assert kept.token_ids.tolist() == [1, 2, 4, 5]


def test_a_response_without_a_token_keeps_its_reward():
    """A prompt that fills the context: the environment may still score it."""
    given = output(
        response_ids=[[4, 5], []], loss_masks=[[1, 1], []], rollout_logprobs=[[-1.0, -1.0], []], rewards=[1.0, 0.25]
    )
    _, empty = samples_of(given)
    assert empty.token_ids.tolist() == [3] and not empty.loss_mask.any() and empty.reward == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_masks": [[1, 1], [1, 0]]}, "sample 1 of the generator has 3 response_ids, 2 loss_masks and 3 rollout"),
        ({"rollout_logprobs": [[-1.0], [-1.0, 0.0, -2.0]]}, "sample 0 .* 2 loss_masks and 1 rollout_logprobs. Return"),
        ({"rewards": [[0.0, 1.0], [1.0]]}, "sample 1 of the generator has 1 rewards for 3 response_ids. Return a num"),
        ({"rewards": [1.0, float("nan")]}, "sample 1 of the generator has reward nan at token 3"),
        ({"rewards": [1.0]}, "returned 2 response_ids and 1 rewards. Return as many"),
        ({"stop_reasons": ["stop"] * 3}, "returned 2 response_ids and 3 stop_reasons"),
        ({"rollout_logprobs": [[-1.0, -1.0]]}, "returned 2 response_ids and 1 rollout_logprobs"),
        ({"prompt_token_ids": [[1, 2], []]}, "sample 1 of the generator has no prompt_token_ids, and nothing predicts"),
        ({"rewards": None, "loss_masks": None}, "returned no rewards, loss_masks. Return them, one for each sample"),
        ({"is_last_step": [True, False]}, "returned 1 complete trajectories in 2 samples for 2 inputs"),
        (
            {"is_last_step": [False, True], "trajectory_ids": [TrajectoryID("7", 0), TrajectoryID("7", 1)]},
            "sample 1 of the generator is of another trajectory than the unfinished one before",
        ),
    ],
)
def test_a_malformed_output_is_refused_with_its_sample_and_the_numbers(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        samples_of(output(**changes))


def test_a_generator_that_returns_nothing_gets_an_error_that_names_what_is_missing():
    with pytest.raises(ValueError, match="returned no prompt_token_ids, response_ids, rewards, loss_masks"):
        samples_of(None)  # type: ignore[arg-type]


def test_more_samples_than_inputs_are_refused():
    with pytest.raises(ValueError, match="2 complete trajectories in 2 samples for 1 inputs. Return one for each"):
        samples_of(output(), n_samples=1)


def test_the_input_has_a_copy_of_the_row_for_each_sample():
    given = input_of(PROMPT, 3, PARAMS, BatchMetadata(4, "train"))
    assert given["prompts"] == [PROMPT.messages] * 3 and given["env_classes"] == ["addition"] * 3
    assert [each.to_string() for each in given["trajectory_ids"] or ()] == ["7_0", "7_1", "7_2"]
    given["prompts"][0][0]["content"] = "changed"
    extras = given["env_extras"] or []
    extras[1]["level"].append(4)
    assert given["prompts"][1] == PROMPT.messages == [{"role": "user", "content": "1+1="}]
    assert extras[2] == PROMPT.extras == {"level": [3]}


def test_sampling_parameters_have_the_names_of_vllm():
    assert vllm_params(PARAMS) == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop": ["!"],
        "logprobs": 0,
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }


def test_a_group_becomes_an_output_and_takes_back_its_rewards_and_masks():
    group = Group(PROMPT, tuple(samples_of(output())))
    given = output_of(group)
    assert {name: given[name] for name in output() if name != "rollout_metrics"} == {  # type: ignore[literal-required]
        name: value for name, value in output().items() if name != "rollout_metrics"
    }
    changed = with_output(group, {"rewards": [2.0, [0.0, 0.0, 3.0]], "loss_masks": [[0, 0], [1, 0, 0]]})
    first, second = changed.samples
    assert first.rewards.tolist() == [0.0, 0.0, 0.0, 2.0] and not first.loss_mask.any()
    assert second.rewards.tolist() == [0.0, 0.0, 0.0, 3.0]
    assert second.loss_mask.tolist() == [False, True, False, False]
    assert output_of(Group(PROMPT, (sample(0.5),)))["rewards"] == [0.5]
    with pytest.raises(ValueError, match="changed the length of a response"):
        with_output(group, {"rewards": [2.0, 1.0], "loss_masks": [[0], [1, 1, 1]]})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"response_ids": [[4, 5], [6, 7, 9]]}, "response_ids of sample 1"),
        ({"prompt_token_ids": [[1, 1], [3]]}, "prompt_token_ids of sample 0"),
        ({"rollout_logprobs": [[-0.25, -0.5], [-1.0, 0.0, 0.0]]}, "rollout_logprobs of sample 1"),
        ({"rollout_logprobs": None}, "rollout_logprobs of sample 0"),
        ({"stop_reasons": ["length", "stop"], "response_ids": [[4], [6]]}, "response_ids, stop_reasons of sample 0"),
        ({"loss_masks": [[1, 1], [1, 1, 0]]}, "loss_masks from 0 to 1 of sample 1"),
    ],
)
def test_a_hook_that_changes_more_than_rewards_and_masks_gets_an_error_that_names_it(
    changes: dict[str, Any], names: str
):
    group = Group(PROMPT, tuple(samples_of(output())))
    message = f"changed {names}. Change rewards, and loss_masks from 1 to 0"
    with pytest.raises(ValueError, match=message):
        with_output(group, output(**changes))


def test_a_hook_may_return_unknown_logprobs_as_they_are():
    group = Group(PROMPT, tuple(samples_of(output(rollout_logprobs=None))))
    assert with_output(group, output_of(group)).rewards == [1.0, -0.5]


def test_tokens_that_stay_trained_keep_their_versions():
    (first, second) = samples_of(output())
    mixed = replace(second, version_spans=((2, 1), (6, 2)), loss_mask=torch.tensor([False, True, True, True]))
    group = Group(PROMPT, (first, mixed))
    changed = with_output(group, {"rewards": [0.0, 0.0], "loss_masks": [[0, 0], [1, 0, 1]]})
    assert changed.samples[1].version_spans == ((2, 1), (6, 1))
    changed = with_output(group, {"rewards": [0.0, 0.0], "loss_masks": [[0, 0], [0, 1, 1]]})
    assert changed.samples[1].version_spans == ((6, 2),)
    assert with_output(group, output_of(group)).samples[1].version_spans == mixed.version_spans
