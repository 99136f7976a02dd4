"""Rollouts of the user's own: what they get, and what becomes of what they return."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from skyrl_train.batching.build import build_experience
from skyrl_train.faults import TENSORS, name_of
from skyrl_train.rollout.admission import Admission, TooManyFailures
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, GenerationAborted, Requests, Rollout, RolloutFailure
from skyrl_train.rollout.streaming.watchdog import NoProgress
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Generation, Group, Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, engines_of, prompt, sample

PARAMS = SamplingParams(max_generate_length=4, seed=7)


class Recorder:
    """Answers each request with its own number of tokens, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams, str]] = []

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        self.asked.append((token_ids, params, route_key))
        return Generation([9] * len(token_ids), [-0.5] * len(token_ids), "9", "stop", 3)


def collect(
    rollout: Rollout, uids: str, n_samples: int = 2, share: float = 0.0, progress: Quiet | None = None
) -> tuple[list[Group], Admission]:
    admission = Admission(share)
    admission.begin(len(uids) * n_samples)
    collector = Collector(rollout, engines_of(Recorder()))
    prompts = [prompt(uid) for uid in uids]
    groups = asyncio.run(collector.collect(prompts, n_samples, PARAMS, progress or Quiet(), admission))
    return groups, admission


def test_rollouts_that_never_end_end_the_collection_with_the_cause_and_their_stacks(caplog: pytest.LogCaptureFixture):
    async def hangs(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        if prompt.uid == "a":
            return sample(1.0)
        try:
            await asyncio.sleep(100)
        finally:
            cancelled.append(prompt.uid)
        raise AssertionError

    cancelled, admission = list[str](), Admission(0)
    collector = Collector(hangs, engines_of(Recorder()), deadline_s=0.1)
    with pytest.raises(NoProgress) as raised:
        asyncio.run(collector.collect([prompt("a"), prompt("b")], 2, PARAMS, Quiet(), admission))
    assert "no request is at the engines: environments, or the rollouts' own code, do not return" in str(raised.value)
    assert "2 rollouts run, of prompt b. The log has the stacks" in str(raised.value)
    assert "in hangs" in caplog.text and cancelled == ["b", "b"]


@pytest.mark.timeout(60)
def test_a_cancelled_rollout_that_hangs_in_its_cleanup_holds_no_error_back(monkeypatch: pytest.MonkeyPatch):
    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        try:
            await asyncio.sleep(0.1 if prompt.uid == "a" else 100)
            raise ValueError("mine")
        finally:
            if prompt.uid == "b":
                await asyncio.sleep(100)

    monkeypatch.setattr("skyrl_train.cancellation.CANCEL_S", 0.1)
    with pytest.raises(RolloutFailure, match="mine"):
        collect(rollout, "ab")


@pytest.mark.parametrize("moves", ["an engine answers", "an environment's call ends"])
def test_rollouts_that_move_may_take_longer_than_the_deadline(moves: str, caplog: pytest.LogCaptureFixture):
    """Those of a large step queue for an engine, or for a thread of the environments."""

    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        for _ in range(8):
            await asyncio.sleep(0.1)
            if moves == "an engine answers":
                await engines.generate([1], params, prompt.uid)
            else:
                engines.requests.note_progress()
        return sample(1.0)

    collector = Collector(rollout, engines_of(Recorder()), deadline_s=0.4)
    (group,) = asyncio.run(collector.collect([prompt("a")], 2, PARAMS, Quiet(), Admission(0)))
    assert len(group.samples) == 2
    assert caplog.text.count("no rollout has ended for") == 1 and "in rollout" in caplog.text


def test_answers_to_others_are_progress_of_requests_that_wait_and_of_nothing_else():
    now = 0.0
    others = Requests(lambda: now)
    requests = Requests(lambda: now, others)
    now = 5.0
    others.note_progress()
    assert requests.quiet_s == 5.0
    with requests.waiting():
        now = 6.0
        assert requests.quiet_s == 1.0 and len(others) == len(requests) == 1
    assert requests.quiet_s == others.quiet_s == 0.0 and len(others) == 0


def test_a_rollout_asks_the_engines_and_each_of_its_requests_has_a_seed_of_its_own():
    generate = Recorder()

    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        trace = Trace()
        for _ in range(2):
            trace.read([1, 2])
            trace.write(await engines.generate(trace.input_ids(), params, prompt.uid))
            unanswered.append(len(engines.requests))
        return trace.to_sample()

    unanswered = list[int]()
    collector, admission = Collector(rollout, engines_of(generate)), Admission(0)
    (group,) = asyncio.run(collector.collect([prompt("a")], 2, PARAMS, Quiet(), admission))
    assert sorted(len(ids) for ids, _, _ in generate.asked) == [2, 2, 6, 6]
    assert {key for _, _, key in generate.asked} == {"a"}
    seeds = [params.seed for _, params, _ in generate.asked]
    assert len(set(seeds)) == 4 and None not in seeds
    assert [len(one.token_ids) for one in group.samples] == [12, 12]
    assert max(unanswered) <= 1 and unanswered[-1] == len(collector.requests) == 0


def test_a_list_of_samples_is_one_rollout_whose_samples_join_the_group():
    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> list[Sample]:
        return [sample(float(n)) for n in range(int(prompt.uid))]

    progress = Quiet()
    groups, admission = collect(rollout, "13", progress=progress)
    assert [[one.reward for one in group.samples] for group in groups] == [[0, 0], [0, 1, 2, 0, 1, 2]]
    assert sorted(progress.rewards) == [0, 0, 2, 2], "the last sample of each rollout"
    assert admission.ledger.generated == admission.ledger.waiting == 2


def fails_for(*failing: tuple[str, int]) -> Rollout:
    """A rollout that fails for the given (uid, number of the call for it)."""
    calls: dict[str, int] = {}

    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        number = calls[prompt.uid] = calls.get(prompt.uid, -1) + 1
        if (prompt.uid, number) in failing:
            raise KeyError("no sandbox")
        return sample(number)

    return rollout


def test_a_failed_rollout_is_left_out_of_its_group_and_a_group_of_fewer_than_two_has_failed():
    groups, admission = collect(fails_for(("a", 1), ("b", 0), ("b", 2)), "abc", n_samples=3, share=0.5)
    assert [(group.prompt.uid, [one.reward for one in group.samples]) for group in groups] == [
        ("a", [0, 2]),
        ("c", [0, 1, 2]),
    ]
    ledger = admission.ledger
    assert (ledger.generated, ledger.waiting, ledger.failed) == (3, 2, 1)
    assert admission.metrics() == {"generate/num_failed_rollouts": 3, "generate/num_failed_groups": 1}


def test_where_none_may_fail_the_first_failure_ends_the_collection_with_its_own_error():
    with pytest.raises(RolloutFailure, match=r"the rollout .*failed \(prompt b\): KeyError: 'no sandbox'") as raised:
        collect(fails_for(("b", 1)), "abc")
    assert isinstance(raised.value.__cause__, KeyError)


def test_more_failures_than_allowed_end_the_collection_with_their_reasons():
    with pytest.raises(TooManyFailures, match=r"share is 0.2: 2 of 6 rollouts .*prompt b\): KeyError: 'no sa"):
        collect(fails_for(("a", 1), ("b", 0)), "abc", share=0.2)
    assert len(collect(fails_for(("a", 1)), "abc", share=0.2)[0]) == 2


def returns(made: Any) -> Rollout:
    async def returning(prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
        return made if prompt.uid == "a" else sample(1.0)

    return returning


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (None, "it returned None. Return a Sample or a list of at least one"),
        ([], "it returned []. Return a Sample or a list of at least one"),
        ((), "it returned (). Return a Sample or a list of at least one"),
        ([1], "the sample that it returned is int 1: it must be a skyrl_train.types.Sample"),
    ],
)
def test_a_rollout_that_returns_something_else_has_failed(made: Any, problem: str):
    with pytest.raises(RolloutFailure) as raised:
        collect(returns(made), "a")
    assert str(raised.value).startswith("the rollout tests.cpu.rollout.test_contract:returns.<locals>.returning failed")
    assert str(raised.value).endswith(f"(prompt a): {problem}")


NO_TENSORS: list[tuple[dict[str, Any], str]] = [
    (
        {"loss_mask": [False, True, True]},
        r"has list \[False, True, True\] as loss_mask: it must be a tensor of",
    ),
    ({"loss_mask": torch.ones(3)}, r"has a tensor of dtype float32 and shape \[3\] as loss_mask: it must be .* bool"),
    ({"token_ids": torch.ones(1, 3).long()}, r"dtype int64 and shape \[1, 3\] as token_ids: .* one int64 per token"),
    (
        {"token_ids": torch.ones(3, dtype=torch.int32)},
        "dtype int32 .* as token_ids: .* int64 per token, on the CPU",
    ),
    ({"rollout_logprobs": None}, "has NoneType None as rollout_logprobs: it must be a tensor of one float32"),
    ({"rewards": 1.0}, "has float 1.0 as rewards: it must be a tensor of one float64 per token"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy_version": None}, "has NoneType None as policy_version: it must be a whole number"),
    ({"turns": "1"}, "has str '1' as turns: it must be a whole number"),
    ({"env_metrics": [1]}, r"has list \[1\] as env_metrics: it must be a dict"),
    ({"transcript": [{"role": "user"}, "timeout"]}, "has str 'timeout' in transcript: each message must be a dict"),
    ({"transcript": [{"content": "a"}]}, r"has dict \{'content': 'a'\} in transcript: each message must be a dict"),
    ({"version_spans": ((0, 1, 2),)}, "as version_spans: each must be"),
    ({"rewards": torch.zeros(2)}, "has 3 token_ids, 3 loss_mask, 3 rollout_logprobs and 2 rewards: .* must be equal"),
    ({"rewards": torch.tensor([0.0, float("nan"), 1.0])}, "has reward nan at token 1: the rollout or environment must"),
    ({"rewards": torch.tensor([0.0, 0.0, -float("inf")])}, "has reward -inf at token 2"),
    ({"named_rewards": {"a": 1.0, "b": float("nan")}}, "has named reward b float nan"),
    ({"named_rewards": {"a": "1"}}, "has named reward a str '1'"),
    ({"token_ids": torch.tensor([1, -100, 2])}, "has token id -100"),
    ({"prompt_length": 4}, "has prompt_length 4 of 3 tokens"),
    ({name: torch.tensor([], dtype=getattr(sample(0.0), name).dtype) for name in TENSORS}, "has no tokens"),
]


@pytest.mark.parametrize(("changes", "problem"), [*NO_TENSORS, *WRONG])
def test_a_sample_that_cannot_be_trained_is_a_failure_of_its_rollout_which_is_left_out(
    changes: dict[str, Any], problem: str
):
    made = replace(sample(1.0), **changes)
    with pytest.raises(RolloutFailure, match=problem):
        collect(returns(made), "ab")
    groups, admission = collect(returns(made), "abc", share=0.5)
    assert [group.prompt.uid for group in groups] == ["b", "c"]
    assert admission.metrics() == {"generate/num_failed_rollouts": 2, "generate/num_failed_groups": 1}


def test_the_first_faults_of_the_first_wrong_sample_are_named():
    wrong = replace(sample(1.0), turns=None, env_metrics=None, transcript=None, policy_version=None)  # type: ignore[arg-type]
    with pytest.raises(RolloutFailure) as raised:
        collect(returns([replace(sample(1.0), ends_conversation=False), wrong]), "a")
    assert "sample 1 of the 2 that it returned has NoneType None as turns" in str(raised.value)
    assert str(raised.value).count("NoneType") == 3 and str(raised.value).endswith("; and 1 more")


def test_samples_of_other_usual_dtypes_are_trained():
    made = sample(1.0)
    made = replace(made, rewards=made.rewards.int(), rollout_logprobs=made.rollout_logprobs.double())
    made = replace(made, named_rewards={"a": np.float32(1), "b": torch.tensor(1.0)}, turns=np.int64(1))
    (group,) = collect(returns(made), "a")[0]
    batch = build_experience([group], policy_version=0)
    assert (batch.rewards.dtype, batch.rollout_logprobs.dtype) == (torch.float64, torch.float32)


async def misspells(prompt: Prompt, params: SamplingParams, engines: Any) -> Sample:
    return await engines.generat([1])  # type: ignore[no-any-return]


async def asks_for_too_much(prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
    return await engines.generate([1] * 9, params, prompt.uid)


async def reads_no_json(prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
    return json.loads("{")


def returns_at_once(prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
    return []


class Object:
    async def __call__(self, prompt: Prompt, params: SamplingParams, engines: Engines) -> Any:
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("rollout", "name", "problem", "line"),
    [
        (misspells, "misspells", "AttributeError: 'Engines' object has no attribute 'generat'", misspells),
        (asks_for_too_much, "asks_for_too_much", "ValueError: a request has 9 tokens, more than", asks_for_too_much),
        (partial(reads_no_json), "reads_no_json", "JSONDecodeError: Expecting property name", reads_no_json),
        (returns_at_once, "returns_at_once", "TypeError: object list can't be used in 'await' expression", None),
        (Object(), "Object", "ValueError: mine", Object.__call__),
    ],
)
def test_an_error_of_a_rollout_names_it_its_prompt_and_its_line(rollout: Any, name: str, problem: str, line: Any):
    with pytest.raises(RolloutFailure) as raised:
        collect(rollout, "a")
    message = str(raised.value)
    assert message.startswith(f"the rollout tests.cpu.rollout.test_contract:{name} failed (prompt a): {problem}")
    assert message.endswith(f"({__file__}:{line.__code__.co_firstlineno + 1})" if line else "'await' expression")


def test_a_failure_names_the_file_and_line_of_the_row_where_they_are_known():
    async def fails(*_: Any) -> Sample:
        raise KeyError("tool")

    rows = [replace(prompt("5"), location="data/sums.jsonl, line 6"), replace(prompt("6"), location="x.parquet, row 0")]
    admission = Admission(1.0)
    admission.begin(2)
    collector = Collector(fails, engines_of(Recorder()))
    asyncio.run(collector.collect(rows, 1, PARAMS, Quiet(), admission))
    first, second = map(str, admission.failures)
    assert "fails failed (prompt 5 from data/sums.jsonl, line 6): KeyError: 'tool'" in first
    assert "failed (prompt 6 from x.parquet, row 0)" in second


async def raises_cancelled(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
    if prompt.uid == "a":
        raise asyncio.CancelledError("of a client")
    return sample(1.0)


async def exits(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
    if prompt.uid == "a":
        sys.exit("no key of the judge")
    return sample(1.0)


async def fails_in_a_group(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
    """A task counts as cancelled after a TaskGroup that failed (Python 3.11)."""

    async def tool() -> None:
        await asyncio.sleep(0)
        raise ValueError("no such file")

    if prompt.uid == "a":
        async with asyncio.TaskGroup() as group:
            group.create_task(tool())
    return sample(1.0)


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        (raises_cancelled, r"CancelledError: of a client \(.*:"),
        (exits, r"SystemExit: no key of the judge \(.*:"),
        (fails_in_a_group, "ExceptionGroup"),
    ],
)
def test_a_rollout_whose_own_code_raises_what_ends_a_task_has_failed(rollout: Rollout, problem: str):
    with pytest.raises(RolloutFailure, match=rf"{rollout.__name__} failed \(prompt a\): {problem}"):
        collect(rollout, "ab")
    groups, admission = collect(rollout, "ab", share=0.5)
    assert [group.prompt.uid for group in groups] == ["b"] and len(admission.failures) == 2


def test_a_rollout_that_cancels_its_own_task_ends_the_collection_with_an_error():
    async def cancels(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError

    with pytest.raises(RuntimeError, match="^prompt a: a rollout's own code cancelled its task"):
        collect(cancels, "a", share=0.5)


def test_an_error_of_the_engines_is_no_failure_of_the_rollout_whatever_that_makes_of_it():
    async def broken(token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        raise ConnectionError("engine 0 is gone")

    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        try:
            await engines.generate([1], params, prompt.uid)
        except ConnectionError:
            raise ValueError("something went wrong") from None
        return sample(0)

    admission = Admission(0.9)
    admission.begin(10)
    with pytest.raises(ConnectionError, match="engine 0 is gone"):
        collector = Collector(rollout, engines_of(broken))
        asyncio.run(collector.collect([prompt("a")], 2, PARAMS, Quiet(), admission))


def test_a_rollout_cannot_do_without_the_engines_that_failed():
    async def broken(token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        raise ConnectionError("engine 0 is gone")

    async def swallows(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        with contextlib.suppress(Exception):
            await engines.generate([1], params, prompt.uid)
        return sample(0)

    with pytest.raises(ConnectionError, match="engine 0 is gone"):
        asyncio.run(Collector(swallows, engines_of(broken)).collect([prompt("a")], 2, PARAMS, Quiet(), Admission(0)))


def test_a_rollout_that_is_cancelled_is_not_tried_again_whatever_it_raises():
    started = []

    async def closes(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        started.append(prompt.uid)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            raise ConnectionError("client closed") from error
        return sample(0)

    async def main() -> None:
        collector = Collector(closes, engines_of(None))
        collecting = asyncio.create_task(
            collector.collect([prompt("a")], 1, PARAMS, Quiet(), Admission(0, num_attempts=2))
        )
        await asyncio.sleep(0.05)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

    asyncio.run(main())
    assert started == ["a"]


def test_a_request_that_is_too_long_is_the_rollouts_own_failure():
    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        await engines.generate([1] * (9 if prompt.uid == "a" else 8), params, prompt.uid)
        return sample(0)

    groups, _ = collect(rollout, "abc", share=0.5)
    assert [group.prompt.uid for group in groups] == ["b", "c"]
    with pytest.raises(RolloutFailure, match="9 tokens, more than generator.max_input_length 8"):
        collect(rollout, "a")


VOCABULARY = 20
NO_LIST = "as prompt_token_ids: it must be a list of at least one token id. Use engines.chat.prompt_ids(messages)"
OUTSIDE = "in prompt_token_ids: ids are those of the policy's tokenizer, from 0 to 19"


@pytest.mark.parametrize(
    ("ids", "params", "problem"),
    [
        ("1+2=", PARAMS, f"got str '1+2=' {NO_LIST}"),
        (BatchEncoding({"input_ids": [1]}), PARAMS, f"got BatchEncoding {{'input_ids': [1]}} {NO_LIST}"),
        (torch.tensor([1, 2]), PARAMS, f"got a tensor of dtype int64 and shape [2] {NO_LIST}"),
        ((1, 2), PARAMS, f"got tuple (1, 2) {NO_LIST}"),
        ([[1, 2]], PARAMS, f"got a list that holds list {NO_LIST}"),
        ([1, True, "a"], PARAMS, f"got a list that holds bool, int, str {NO_LIST}"),
        ([], PARAMS, f"got list [] {NO_LIST}"),
        (None, PARAMS, f"got NoneType None {NO_LIST}"),
        ([1, 20], PARAMS, f"got token id 20 {OUTSIDE}"),
        ([-100, 1], PARAMS, f"got token id -100 {OUTSIDE}"),
        (
            [1],
            {"temperature": 1.0},
            "got dict {'temperature': 1.0} as sampling_params: it must be a SamplingParams. Pass",
        ),
        ([1], None, "got NoneType None as sampling_params: it must be a SamplingParams. Pass those of the rollout"),
    ],
)
def test_arguments_that_no_engine_can_answer_are_the_rollouts_own_failure(ids: Any, params: Any, problem: str):
    """Not an error of the engines, which would end the run: the prompt is left out, and the engines are not asked."""
    asked = Recorder()

    async def rollout(prompt: Prompt, right: SamplingParams, engines: Engines) -> Sample:
        wrong = prompt.uid == "a"
        await engines.generate(ids if wrong else [1, 19], params if wrong else right, prompt.uid)
        return sample(0)

    line = rollout.__code__.co_firstlineno + 2
    engines = engines_of(asked)
    engines.vocab_size = VOCABULARY
    collector, admission = Collector(rollout, engines), Admission(0.5)
    admission.begin(4)
    groups = asyncio.run(collector.collect([prompt("a"), prompt("b")], 2, PARAMS, Quiet(), admission))
    assert [group.prompt.uid for group in groups] == ["b"] and {key for *_, key in asked.asked} == {"b"}
    with pytest.raises(RolloutFailure) as raised:
        asyncio.run(collector.collect([prompt("a")], 2, PARAMS, Quiet(), Admission(0)))
    message = str(raised.value)
    assert message.startswith(
        f"the rollout {name_of(rollout)} failed (prompt a): ValueError: engines.generate {problem}"
    )
    assert message.endswith(f"({__file__}:{line})")


def test_token_ids_of_numpy_reach_the_engines_as_integers():
    asked = Recorder()
    asyncio.run(engines_of(asked).generate(list(np.array([3, 4])), PARAMS, "a"))
    ids = asked.asked[0][0]
    assert ids == [3, 4] and {type(each) for each in ids} == {int}


class Aborts:
    """Aborts each request after these numbers of tokens, which count on from the prompt, under a new version."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.version = iter(lengths), 0
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        self.asked.append((token_ids, params))
        self.version += 1
        length = next(self.lengths, None)
        stop_reason = "stop" if length is None else "abort"
        length = 2 if length is None else length
        ids = [token_ids[-1] + 1 + n for n in range(length)]
        logprobs = [-float(token) for token in ids]
        return Generation(ids, logprobs, "", stop_reason, self.version, ((self.version, length),))


class Spelled:
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def aborted(engine: Aborts, **params: Any) -> Generation:
    engines = Engines(engine, Spelled(), None, max_input_length=1, max_turns=1)  # type: ignore[arg-type]
    return asyncio.run(engines.generate([4], SamplingParams(max_generate_length=8, **params), "a"))


def test_an_aborted_generation_continues_from_its_tokens_with_their_logprobs_and_versions():
    engine = Aborts(2, 0, 3)
    assert aborted(engine, seed=5) == Generation(
        token_ids=[5, 6, 7, 8, 9, 10, 11],
        logprobs=[-5.0, -6.0, -7.0, -8.0, -9.0, -10.0, -11.0],
        text="5 6 7 8 9 10 11",
        stop_reason="stop",
        policy_version=1,
        version_spans=((1, 2), (3, 3), (4, 2)),
    )
    assert [ids for ids, _ in engine.asked] == [[4], [4, 5, 6], [4, 5, 6], [4, 5, 6, 7, 8, 9]]
    assert [params.max_generate_length for _, params in engine.asked] == [8, 6, 6, 3]
    assert len({params.seed for _, params in engine.asked}) == 3, "a seed for each number of tokens"


def test_an_aborted_generation_that_had_all_its_tokens_ends():
    generation = aborted(Aborts(2, 6))
    assert generation.stop_reason == "length" and len(generation.token_ids) == 8


def test_an_aborted_generation_with_stop_strings_starts_again():
    engine = Aborts(2)
    assert aborted(engine, stop=("7",)).token_ids == [5, 6]
    assert [ids for ids, _ in engine.asked] == [[4], [4]]


def test_a_generation_that_is_aborted_again_and_again_is_an_error_that_names_turn_and_prompt():
    with pytest.raises(GenerationAborted, match="aborted turn 1 of a sample of prompt a"):
        aborted(Aborts(*[0] * 100))
