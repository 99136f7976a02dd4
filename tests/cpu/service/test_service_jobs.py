"""What callers submit to a service: what becomes of it, and what is refused before it is queued."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.algorithms.credit import per_sample
from skyrl_train.algorithms.tables import ADVANTAGES
from skyrl_train.batching.split import mini_batches_of
from skyrl_train.config import ConfigError, load_config
from skyrl_train.service.checks import check_service
from skyrl_train.service.client import listed
from skyrl_train.service.job import ChatSample, TokenSample
from skyrl_train.service.job_reader import JobReader
from skyrl_train.types import UNKNOWN_VERSION
from tests.support.tiny import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
CONFIG_OVERRIDES = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2", "data.train_data=[]"]
CONFIG = load_config(CONFIG_OVERRIDES)
READER = JobReader(CONFIG, TOKENIZER, vocab_size=66, max_tokens=40)
ASKED = [{"role": "user", "content": "1+1="}]


def chat(answer: str, reward: float) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": "assistant", "content": answer}], "reward": reward}


def tokens(**changes: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1.0} | changes


GROUP = [tokens(), tokens(reward=0.0)]
SAMPLED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What an engine's answer says where the whole distribution was sampled."""


def test_messages_become_the_tokens_of_the_chat_template_with_the_loss_on_the_assistant():
    job = JobReader(CONFIG, TOKENIZER, 66, 500).train([[chat("2", 1.0), chat("3", -0.5)]])
    good, bad = job.groups[0].samples
    text = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert TOKENIZER.decode(good.token_ids) == text
    assert TOKENIZER.decode(good.token_ids[good.loss_mask]) == "2<|im_end|>"
    assert (good.reward, bad.reward, good.turns, good.prompt_length) == (1.0, -0.5, 1, len(good.token_ids) - 3)
    assert not job.has_logprobs


@pytest.mark.parametrize(
    ("reason", "trained"),
    [
        (None, "23<|im_end|>"),
        ("stop", "23<|im_end|>"),
        ("tool_calls", "23<|im_end|>"),
        ("length", "23"),
        ("abort", "23"),
    ],
)
def test_the_end_of_an_answer_that_was_cut_off_is_not_trained(reason: str | None, trained: str):
    turns = [*ASKED, {"role": "assistant", "content": "5"}, *ASKED, {"role": "assistant", "content": "23"}]
    given = {"messages": turns, "reward": 1.0, "finish_reason": reason, "policy_versions": [3]}
    (sample, _) = JobReader(CONFIG, TOKENIZER, 66, 500).train([[given, given]]).groups[0].samples
    assert TOKENIZER.decode(sample.token_ids[sample.loss_mask]) == f"5<|im_end|>{trained}"
    assert sample.stop_reason == ("length" if trained == "23" else "stop")
    assert TOKENIZER.decode(sample.token_ids).endswith("assistant\n23" + "<|im_end|>\n" * (trained != "23"))
    assert sample.version_spans == ((3, int(sample.loss_mask.sum())),)


def test_an_answer_of_nothing_that_was_cut_off_counts_by_its_reward():
    empty = {"messages": [*ASKED, {"role": "assistant", "content": ""}], "reward": 0.0, "finish_reason": "length"}
    (_, sample) = JobReader(CONFIG, TOKENIZER, 66, 500).train([[chat("2", 1.0), empty]]).groups[0].samples
    assert not sample.loss_mask.any() and sample.prompt_length == len(sample.token_ids) and sample.reward == 0.0
    with pytest.raises(ValueError, match="no token would be trained"):
        READER.train([[tokens(loss_mask=[0, 0, 0]), tokens()]])


def test_tokens_are_taken_as_they_are_and_the_first_is_never_trained():
    given = TokenSample(token_ids=[5, 6, 7, 8], loss_mask=[1, 1, 0, 1], reward=1, logprobs=[-9, -0.5, -3, -0.25])
    (sample, _) = READER.train([[given, given]]).groups[0].samples
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.loss_mask.tolist() == [False, True, False, True]
    assert sample.rollout_logprobs.tolist() == [0.0, -0.5, 0.0, -0.25]
    assert sample.turns == 2 and sample.prompt_length == 1


def test_numbers_may_be_those_of_numpy_and_torch():
    plain = READER.train([[tokens(reward=0.5, logprobs=[0.0, -0.5, -0.25], policy_versions=[3])] * 2])
    for of, whole, real in [(np.array, np.int64, np.float32), (torch.tensor, torch.tensor, torch.tensor)]:
        arrays = tokens(
            token_ids=of([5, 6, 7]),
            loss_mask=of([False, True, True]),
            reward=real(0.5),
            logprobs=of([0.0, -0.5, -0.25]),
            policy_versions=of([3]),
        )
        lists = tokens(
            token_ids=[whole(one) for one in (5, 6, 7)],
            loss_mask=[whole(one) for one in (0, 1, 1)],
            reward=of([0.0, 0.5]).mean() * 2,
            logprobs=[real(one) for one in (0.0, -0.5, -0.25)],
            policy_versions=[whole(3)],
        )
        job = READER.train([[arrays, lists]])
        assert job.sampled_by == plain.sampled_by and job.has_logprobs
        for sample in job.groups[0].samples:
            expected = plain.groups[0].samples[0]
            assert sample.reward == 0.5 and type(sample.reward) is float
            assert torch.equal(sample.token_ids, expected.token_ids)
            assert torch.equal(sample.loss_mask, expected.loss_mask)
            assert torch.equal(sample.rollout_logprobs, expected.rollout_logprobs)


def test_logprobs_count_as_given_only_if_every_sample_has_them():
    with_them = tokens(logprobs=[0.0, -1.0, -1.0])
    assert READER.train([[with_them, with_them]]).has_logprobs
    assert not READER.train([[with_them, tokens()]]).has_logprobs


def test_versions_that_generated_samples_are_kept_with_the_first_place_of_each():
    groups = [[tokens(policy_versions=[3]), chat("2", 1.0) | {"policy_versions": [3, 4]}], [tokens(), tokens()]]
    job = JobReader(CONFIG, TOKENIZER, 66, 500).train([*groups, [tokens(policy_versions=[4])] * 2, GROUP])
    assert job.sampled_by == {3: "group 0, sample 0", 4: "group 0, sample 1"}
    one_version, two_versions = job.groups[0].samples
    assert one_version.version_spans == ((3, int(one_version.loss_mask.sum())),)
    assert two_versions.version_spans == (), "which tokens are of which version is not known"


def test_only_logprobs_of_a_known_version_are_compared_with_the_trainers():
    known = tokens(logprobs=[0.0, -1.0, -1.0], policy_versions=[3], sampling_params=SAMPLED)
    no_version, no_logprobs = tokens(logprobs=[0.0, -1.0, -1.0]), tokens(policy_versions=[3])
    (group,) = READER.train([[known, no_version, no_logprobs]]).groups
    assert [sample.policy_version for sample in group.samples] == [3, UNKNOWN_VERSION, UNKNOWN_VERSION]


def test_groups_and_rows_may_come_from_generators():
    groups = listed(((tokens(reward=reward) for reward in (0.0, 1.0)) for _ in range(2)), 2)
    assert [len(group.samples) for group in READER.train(groups).groups] == [2, 2]
    rows = listed(({"input_ids": [5, 6], "loss_mask": [0, 1]} for _ in range(3)), 1)
    assert len(READER.sft(rows).examples) == 3


def test_groups_are_split_into_the_configured_mini_batches():
    assert [mini_batches_of(len(READER.train([GROUP] * num).groups), 2) for num in (1, 2, 4)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], "groups must be a list of at least one group, got list []"),
        ("text", "groups must be a list of at least one group, got str 'text'"),
        ([[]], "group 0 must be a list of at least one sample"),
        ([GROUP, [tokens()]], "group 1 has one sample, to which trainer.algorithm.advantage_estimator=grpo gives no"),
        ([GROUP] * 3, "policy_mini_batch_size is 2: 3 groups cannot be split into mini-batches"),
        ([[5]] * 3, "policy_mini_batch_size is 2: 3 groups cannot be split into mini-batches"),  # before any is read
        (5, "groups must be a list of at least one group, got int 5"),
        ([5], "group 0 must be a list of at least one sample, got int 5"),
        (tokens(), "groups must be a list of at least one group, got dict {'loss_mask': [0, 1, 1]"),
        ([tokens()], "group 0 must be a list of at least one sample, got dict {'loss_mask': [0, 1, 1]"),
        (iter([TokenSample(**tokens())]), "group 0 must be a list of at least one sample, got TokenSample"),
        ([[tokens(), 5]], "group 0, sample 1: expected a dict, ChatSample or TokenSample, got int 5"),
        ([[tokens(rewards=1), tokens()]], "group 0, sample 0: 'rewards' is not a field of TokenSample; did you mean"),
        ([[{"token_ids": [1, 2]}, tokens()]], "reward, loss_mask is missing"),
        ([[{"messages": ASKED}, tokens()]], "group 0, sample 0: reward is missing: a sample has reward, messages"),
        ([[tokens(reward=float("nan")), tokens()]], "group 0, sample 0: reward is float nan: it must be a finite"),
        ([[tokens(reward=1e39), tokens()]], "reward is float 1e+39: it must be a finite number"),
        ([[tokens(reward=np.float32("nan")), tokens()]], "reward is float nan: it must be a finite number"),
        ([[tokens(reward=np.array([0.5, 1])), tokens()]], "reward is list [0.5, 1.0]: it must be a finite number"),
        ([[tokens(token_ids=[5, 6, np.float64(7)]), tokens()]], "token_ids holds 7.0: they must be whole numbers"),
        ([[tokens(token_ids=[5, 6, np.True_]), tokens()]], "token_ids holds True: they must be whole numbers"),
        ([[tokens(reward="1"), tokens()]], "reward is str '1': it must be a finite number"),
        ([[tokens(loss_mask=[0, 1]), tokens()]], "token_ids has 3 entries and loss_mask 2: they must be equally many"),
        ([[tokens(loss_mask=[0, 2, 1]), tokens()]], "loss_mask holds 2: 1 marks a token that the policy wrote"),
        ([[tokens(loss_mask=[1, 0, 0]), tokens()]], "no token would be trained"),
        ([[tokens(logprobs=[0.0, -1.0]), tokens()]], "token_ids has 3 entries and logprobs 2"),
        ([[tokens(logprobs=[0, -1, float("-inf")]), tokens()]], "logprobs is float -inf: it must be a finite number"),
        ([[tokens(token_ids=[5, 6, 66]), tokens()]], "token 66 is outside the model's vocabulary of 66"),
        ([[tokens(token_ids=[5, 6, 7.5]), tokens()]], "token_ids holds 7.5: they must be whole numbers"),
        ([[tokens(token_ids=[5] * 41, loss_mask=[1] * 41), tokens()]], "it has 41 tokens, and the model takes 40"),
        ([[ChatSample(messages=ASKED, reward=1.0), tokens()]], "no message has the role assistant"),
        (
            [[tokens(finish_reason="eos"), tokens()]],
            "finish_reason is 'eos': copy that of the engine's answer, one of stop, tool_calls, length, abort, repeti",
        ),
        ([[tokens(policy_versions=["7"]), tokens()]], "policy_versions holds '7': they must be whole numbers"),
        ([[tokens(policy_versions=7), tokens()]], "policy_versions must be a list of at least one number, got int 7"),
        (
            [[tokens(sampling_params={"temperature": 0.7}), tokens()]],
            "group 0, sample 0: sampling_params.temperature is 0.7: the service trains at 1 (generator.sampling_",
        ),
        (
            [[tokens(sampling_params=SAMPLED | {"top_k": 20}), tokens()]],
            "sampling_params.top_k is 20: the sample is not from the distribution that is trained, over all tokens. ",
        ),
        ([[chat("2", 1.0) | {"sampling_params": {"top_p": 0.9}}, tokens()]], "over all tokens. Set it to 1"),
        (
            [[tokens(sampling_params={"repetition_penalty": 1.1}), tokens()]],
            "sampling_params.repetition_penalty is 1.1",
        ),
        (
            [[tokens(sampling_params={"logit_bias": True}), tokens()]],
            "over all tokens. Remove it from the request",
        ),
        ([[tokens(sampling_params="greedy"), tokens()]], "sampling_params must be a dict, as in the engine's answer"),
        ([[{"messages": "hi", "reward": 1}, tokens()]], "expected a list of chat messages, got str 'hi'"),
    ],
)
def test_groups_that_cannot_be_trained_on_are_refused_with_place_and_reason(groups: Any, expected: str):
    with pytest.raises(ValueError) as error:
        READER.train(listed(groups, 2))
    assert expected in str(error.value)


def test_rows_are_those_of_fine_tuning():
    (example,) = READER.sft([{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}]).examples
    assert example.token_ids.tolist() == [5, 6, 7] and example.loss_mask.tolist() == [False, True, False]


NESTED: Any = functools.reduce(lambda inside, _: [inside], range(100_000), "x")


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (chat("2\ud800", 1.0), "`content` of message 1 has '.ud800' at character 1, half of a surrogate pair"),
        (chat("2" * 1_000_001, 1.0), "the text has 1,000,0.. characters: more than 40 tokens"),
        (chat(NESTED, 1.0), "`content` of message 1 must be text, got list"),
        (chat("2", NESTED), "reward is list .*it must be a finite number"),
        (tokens(token_ids=[5, NESTED, 7]), "token_ids holds .*: they must be whole numbers"),
        (tokens(loss_mask=[0, NESTED, 1]), "loss_mask holds .*: 1 marks a token"),
        (tokens(token_ids=[5, 6, 10**30]), "is outside the model's vocabulary of 66"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_text_that_cannot_be_used_and_values_of_any_depth_are_named(sample: Any, expected: str):
    with pytest.raises(ValueError, match=f"group 0, sample 1: .*{expected}") as caught:
        READER.train([[tokens(), sample]])
    assert len(str(caught.value)) < 300


def test_a_service_refuses_an_advantage_that_only_the_callers_program_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ADVANTAGES, "_entries", dict(ADVANTAGES._entries))
    ADVANTAGES.register("mine", per_sample(lambda rewards, group_ids: rewards))
    with pytest.raises(
        ConfigError,
        match="advantage_estimator is mine, which this program registered",
    ):
        check_service(load_config(["trainer.algorithm.advantage_estimator=mine"]), files=False)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "rows must be a list of at least one row"),
        (tokens(), "rows must be a list of at least one row, got dict"),
        ([7], "row 0 must be a dict, got int 7"),
        (
            [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"text": "x"}],
            "row 1: the columns are text: a row needs `messages`, or",
        ),
        ([{"input_ids": [5] * 41, "loss_mask": [1] * 41}], "row 0: it has 41 tokens, and the model takes 40"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_with_place_and_reason(rows: Any, expected: str):
    with pytest.raises(ValueError) as error:
        READER.sft(listed(rows, 1))
    assert expected in str(error.value)


def test_a_checkpoint_goes_to_an_absolute_path():
    assert READER.save("/models/a").folder == "/models/a"
    with pytest.raises(ValueError, match="folder is str .*: it must be an absolute path"):
        READER.save("models/a")


def test_a_checkpoint_does_not_replace_the_model_of_the_service(tmp_path: Path):
    """A rank that is replaced reads it again, and would add its adapter to weights that have it already."""
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    config = load_config([f"trainer.policy.model.path={tmp_path}/base"])
    reader = JobReader(config, TOKENIZER, 66, 500)
    assert reader.save(f"{tmp_path}/new").folder == f"{tmp_path}/new"
    with pytest.raises(ValueError, match=r"link: the service loads trainer.policy.model.path from it. Choose another"):
        reader.save(f"{tmp_path}/link")


def test_a_service_has_no_last_step_no_checkpoints_and_no_rows():
    with pytest.raises(ConfigError, match="scheduler is linear: it decays towards the last step"):
        check_service(load_config(["trainer.policy.optimizer_config.scheduler=linear"]))
    with pytest.raises(ConfigError, match="trainer.resume_mode is latest: a service writes no checkpoints"):
        check_service(load_config(["trainer.resume_mode=latest"]))
    with pytest.raises(ConfigError, match="trainer.source or generator.rollout is set: a service trains on"):
        check_service(load_config(["generator.rollout=asyncio:create_subprocess_exec"]))
    hint = ["trainer.teacher.backend=policy", "trainer.algorithm.distillation.distillation_hint='{prompt} {answer}'"]
    with pytest.raises(ConfigError, match="distillation_hint is set: .* the jobs of a service have tokens alone"):
        check_service(load_config([*hint, "trainer.algorithm.distillation.distillation_type=loss"]), files=False)


@pytest.mark.parametrize(
    ("estimator", "lack"), [("gae", "critic"), ("remax", "greedy responses"), ("gdpo", "named rewards")]
)
def test_a_service_refuses_estimators_that_need_what_no_job_has(estimator: str, lack: str):
    with pytest.raises(ConfigError, match=f"advantage_estimator is {estimator}: a service has no {lack}. Use grpo"):
        check_service(load_config([f"trainer.algorithm.advantage_estimator={estimator}"]), files=False)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("generator.zero_reward_on_non_stop=true", "false"),
        ("generator.apply_overlong_filtering=true", "false"),
        ("trainer.algorithm.overlong_buffer.len=8", "null"),
        ("trainer.algorithm.zero_variance_filter=true", "false"),
        ("trainer.algorithm.dynamic_sampling.type=filter", "null"),
        ("trainer.over_sampling_batch_size=2000", "null"),
    ],
)
def test_a_service_refuses_penalties_and_filters_that_it_would_not_apply(override: str, remedy: str):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"{key} is {value}: .* that its clients submit. Set it to {remedy}$"):
        check_service(load_config([override]), files=False)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.algorithm.corrections=[token_tis]",
        "trainer.algorithm.policy_loss_type=dppo",
        "trainer.algorithm.prox_logp_method=loglinear",
        "generator.quantization=fp8",
    ],
)
def test_samples_without_logprobs_are_refused_where_the_update_weighs_tokens_by_them(override: str):
    """As logprobs of 0 they would say that the engine was certain of every token."""
    config = load_config([*CONFIG_OVERRIDES, "generator.model_dtype=bfloat16", override])
    reader = JobReader(config, TOKENIZER, 66, 500)
    with_them = tokens(logprobs=[0.0, -1.0, -1.0])
    assert reader.train([[with_them, with_them]]).has_logprobs
    for without in (tokens(), chat("2", 1.0)):
        with pytest.raises(ValueError, match="group 0, sample 1: it has no logprobs"):
            reader.train([[with_them, without]])
