"""A generator of skyrl_train 0.4 as a collector: one call per group, and what becomes of its outputs and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from skyrl_train.algorithms.build import needs_logprobs
from skyrl_train.compat.generators.client import InferenceEngineClient
from skyrl_train.compat.generators.collector import GeneratorCollector, Postprocessed
from skyrl_train.compat.generators.types import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.config import load_config
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.admission import Admission, Ledger, TooManyFailures
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, RolloutFailure
from skyrl_train.rollout.oversampling import OverSamplingSource
from skyrl_train.rollout.source import SourceParts
from skyrl_train.rollout.streaming.watchdog import NoProgress
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Generation, Group, Prompt, Sample, SamplingParams
from tests.support.rollouts import Quiet, prompt, sample
from tests.support.scripted import NeverAnswers
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PARAMS = SamplingParams(max_generate_length=4, seed=7)
Generate = Callable[[list[int], SamplingParams, str], Awaitable[Generation]]


class Recorder:
    """Answers each request with its own number of tokens, and keeps what was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[list[int], SamplingParams, str]] = []
        self.error = error

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        self.asked.append((token_ids, params, route_key))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Generation([9] * len(token_ids), [-0.5] * len(token_ids), "9", "stop", 2 + len(token_ids))


class Single(GeneratorInterface):
    """Asks for all answers at once; their number of tokens is the reward."""

    def __init__(self) -> None:
        self.client = InferenceEngineClient(TOKENIZER, "model")
        self.inputs: list[GeneratorInput] = []
        self.fails: Callable[[str], bool] = lambda uid: False
        self.change: Callable[[GeneratorOutput], Any] = lambda output: None

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.inputs.append(input_batch)
        ids = input_batch["trajectory_ids"] or []
        if self.fails(ids[0].instance_id):
            raise KeyError("no sandbox")
        prompts = input_batch["prompts"]
        answers = await self.client.generate({"prompts": prompts, "session_ids": [each.to_string() for each in ids]})
        responses = answers["response_ids"]
        output = GeneratorOutput(
            prompt_token_ids=[TOKENIZER.encode(messages[-1]["content"]) for messages in prompts],
            response_ids=responses,
            rewards=[float(len(response)) for response in responses],
            loss_masks=[[1] * len(response) for response in responses],
            stop_reasons=answers["stop_reasons"],
            rollout_metrics={"judge/seconds": float(len(responses[0]))},
            rollout_logprobs=answers["response_logprobs"],
        )
        self.change(output)
        return output


class World:
    """A collector of a generator, with what it reports."""

    def __init__(self, generate: Generate | None = None, generator: GeneratorInterface | None = None) -> None:
        self.generate = generate or Recorder()
        self.generator = generator or Single()
        self.reported: list[Mapping[str, Any]] = []
        self.progress = Quiet()
        chat = ChatTemplate(TOKENIZER, {})
        engines = Engines(self.generate, TOKENIZER, chat, max_input_length=8, max_turns=1)
        self.evaluating = GeneratorCollector(self.generator, self._no_rollout, engines, lambda: 3, self.reported.append)

    async def _no_rollout(self, *arguments: Any) -> Any:
        raise AssertionError("no environment is played")

    def training(self, needs: bool = True) -> GeneratorCollector:
        return self.evaluating.for_training(lambda: 11, needs_logprobs=needs)

    def collect(
        self, uids: str, n_samples: int = 2, share: float = 0.0, attempts: int = 1, needs: bool = True
    ) -> tuple[list[Group], Admission]:
        admission = Admission(share, num_attempts=attempts)
        admission.begin(len(uids) * n_samples)
        rows = [prompt(uid) for uid in uids]
        made = self.training(needs).collect(rows, n_samples, PARAMS, self.progress, admission)
        return asyncio.run(made), admission


def test_a_token_beyond_the_vocabulary_is_a_failure_of_the_generator():
    def beyond(output: GeneratorOutput) -> None:
        output["response_ids"][0] = [10]

    world = World()
    world.generator.change = beyond  # type: ignore[attr-defined]
    assert world.collect("0")[0]
    world.evaluating.engines.vocab_size = 10
    with pytest.raises(ValueError, match="sample 0 of the generator has token id 10: .* vocabulary has 10 tokens"):
        world.collect("0")


class Hangs(Single):
    """A generator that never returns."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        await asyncio.sleep(100)
        raise AssertionError


def test_a_generator_that_never_returns_ends_the_collection(caplog: pytest.LogCaptureFixture):
    world = World(generator=Hangs())
    world.evaluating.deadline_s = 0.1
    with pytest.raises(NoProgress, match="do not return"):
        world.collect("0")
    assert "in generate" in caplog.text


def test_generate_is_called_for_each_group_and_its_samples_are_those_of_the_engines():
    world = World()
    groups, admission = world.collect("012", n_samples=2)
    assert [group.prompt.uid for group in groups] == ["0", "1", "2"]
    (read,) = TOKENIZER.encode("1")
    for each in groups[1].samples:
        assert each.token_ids.tolist() == [read, 9] and each.prompt_length == 1
        assert each.rollout_logprobs.tolist() == [0.0, -0.5] and each.rewards.tolist() == [0.0, 1.0]
        assert each.policy_version == 3, "the version that answered"
    assert admission.ledger == Ledger(generated=3, waiting=3)
    assert world.progress.rewards == [1.0] * 6 and world.progress.total == -1
    assert [len(given["prompts"]) for given in world.generator.inputs] == [2] * 3  # type: ignore[attr-defined]
    assert [route for _, _, route in world.generate.asked] == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]  # type: ignore[attr-defined]


def test_training_and_evaluation_have_their_phase_their_step_and_their_metrics():
    world = World()
    world.collect("0")
    assert world.reported == [{"judge/seconds": 1.0}]
    admission = Admission(0)
    (group,) = asyncio.run(world.evaluating.collect([prompt("5")], 1, PARAMS, Quiet(), admission))
    assert len(group.samples) == 1 and admission.ledger == Ledger(generated=1, waiting=1)
    assert world.reported == [{"judge/seconds": 1.0}], "metrics of an evaluation are its scores"
    metadata = [given["batch_metadata"] for given in world.generator.inputs]  # type: ignore[attr-defined]
    assert [(each.training_phase, each.global_step) for each in metadata] == [("train", 4), ("eval", 3)]


def test_seeds_depend_on_the_row_and_the_session_alone():
    def seeds(uids: str) -> dict[str, int | None]:
        world = World()
        world.collect(uids)
        return {route: params.seed for _, params, route in world.generate.asked}  # type: ignore[attr-defined]

    first = seeds("012")
    assert len(set(first.values())) == 6 and None not in first.values()
    assert {name: seeds("21")[name] for name in ("1_0", "1_1", "2_1")} == {
        name: first[name] for name in ("1_0", "1_1", "2_1")
    }


def test_samples_that_are_left_out_count_as_failed_and_a_group_of_one_fails():
    def leave_one_out(output: GeneratorOutput) -> None:
        if output["prompt_token_ids"][0] == TOKENIZER.encode("1"):
            for values in output.values():
                if isinstance(values, list):
                    values.pop()

    world = World()
    world.generator.change = leave_one_out  # type: ignore[attr-defined]
    groups, admission = world.collect("01", share=0.5)
    assert [group.prompt.uid for group in groups] == ["0"]
    assert admission.ledger == Ledger(generated=2, waiting=1, failed=1) and len(admission.failures) == 1
    assert "returned 1 complete trajectories for 2 inputs" in str(admission.failures[0])
    groups, admission = world.collect("01", n_samples=3, share=0.5)
    assert [len(group.samples) for group in groups] == [3, 2]
    with pytest.raises(ValueError, match="returned 2 complete trajectories for 3 inputs"):
        world.collect("1", n_samples=3)


@pytest.mark.parametrize("missing", [None, [[-0.5], None]])
def test_missing_logprobs_are_refused_where_the_update_needs_them(missing: Any):
    def without_logprobs(output: GeneratorOutput) -> None:
        output["rollout_logprobs"] = missing

    world = World()
    world.generator.change = without_logprobs  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"without rollout_logprobs, and the update needs them. .* or set trainer"):
        world.collect("0")
    groups, _ = world.collect("0", needs=False)
    assert groups[0].samples[1].rollout_logprobs.isnan().tolist() == [False, True]
    assert asyncio.run(world.evaluating.collect([prompt("0")], 2, PARAMS, Quiet(), Admission(0)))


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("trainer.algorithm.corrections=[]", False),
        ("trainer.algorithm.corrections=[token_tis]", True),
        ("trainer.algorithm.policy_loss_type=dppo", True),
        ("trainer.algorithm.prox_logp_method=loglinear", True),
    ],
)
def test_corrections_and_losses_say_whether_they_need_logprobs(override: str, needed: bool):
    assert needs_logprobs(load_config([override]).trainer.algorithm.values) is needed


def test_the_first_error_of_a_generator_ends_the_run_and_is_its_own():
    world = World()
    world.generator.fails = lambda uid: uid == "1"  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="no sandbox"):
        world.collect("012")
    assert world.progress.total == -1


def test_a_failed_group_is_repeated_and_left_out_of_the_ledgers_groups():
    world, seen = World(), list[str]()

    def fails(uid: str) -> bool:
        seen.append(uid)
        return uid == "1" or (uid == "0" and seen.count("0") == 1)

    world.generator.fails = fails  # type: ignore[attr-defined]
    groups, admission = world.collect("012", share=0.5, attempts=2)
    assert [group.prompt.uid for group in groups] == ["0", "2"]
    assert seen.count("0") == seen.count("1") == 2 and seen.count("2") == 1
    assert admission.ledger == Ledger(generated=3, waiting=2, failed=1)
    metrics = admission.metrics()
    assert metrics["generate/num_failed_rollouts"] == 2.0 and metrics["generate/num_retried_rollouts"] == 2.0
    admission.ledger.train(2)
    with pytest.raises(TooManyFailures, match="4 of 6 rollouts of the step failed"):
        world.generator.fails = lambda uid: True  # type: ignore[attr-defined]
        world.collect("012", share=0.5)


def test_a_generator_that_raises_cancelled_error_has_failed():
    class Cancels(Single):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            raise asyncio.CancelledError("of a client")

    with pytest.raises(
        RolloutFailure, match=r"generator failed \(prompt 0\): CancelledError: of a client \(.*_collector"
    ):
        World(generator=Cancels()).collect("0")


def test_an_error_of_the_engines_ends_the_run_even_if_the_generator_hides_it():
    class Hides(Single):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            try:
                return await super().generate(input_batch)
            except ConnectionError:
                return GeneratorOutput(prompt_token_ids=[], response_ids=[], rewards=[], loss_masks=[])

    with pytest.raises(ConnectionError, match="engine 0 is gone"):
        World(Recorder(ConnectionError("engine 0 is gone")), Hides()).collect("0", share=1.0)


def test_a_request_that_is_too_long_fails_its_group_alone_and_cancels_its_other_requests():
    generate = NeverAnswers()
    cancelled: list[list[str]] = []

    class TooLong(Single):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            try:
                await self.client.generate({"prompt_token_ids": [[1], [1] * 9]})
            finally:
                cancelled.append(list(generate.cancelled))  # now, before the loop ends and cancels what is left
            raise AssertionError("the client raises")

    groups, admission = World(generate, TooLong()).collect("0", share=1.0)
    assert groups == [] and admission.ledger == Ledger(generated=1, failed=1)
    assert "a request has 9 tokens, more than generator.max_input_length 8" in str(admission.failures[0])
    assert cancelled == [["0"]] and generate.asked == ["0"]


def test_cancellation_reaches_the_requests_and_leaves_no_task_behind():
    generate = NeverAnswers()
    world = World(generate)

    async def main() -> set[asyncio.Task[Any]]:
        rows = [prompt(uid) for uid in "012"]
        made = world.training().collect(rows, 2, PARAMS, world.progress, Admission(0))
        task = asyncio.create_task(made)
        await generate.until_asked(6)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(main()) == set()
    assert sorted(generate.cancelled) == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]
    assert world.progress.total == -1


def test_greedy_responses_are_refused():
    with pytest.raises(ValueError, match="greedy responses, which a generator does not make"):
        asyncio.run(World().training().collect([prompt("0")], 2, PARAMS, Quiet(), Admission(0), with_greedy=True))


def test_a_trainers_postprocessing_changes_rewards_and_masks_of_each_group():
    seen: list[list[str]] = []

    def hook(output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        seen.append(uids)
        output["rewards"] = [10.0 + index for index in range(len(uids))]
        output["loss_masks"] = [[0] * len(mask) for mask in output["loss_masks"]]
        return output

    collector = Postprocessed(World().training(), hook, lambda: False, filters=False, zeroes_unfinished=False)
    groups = asyncio.run(collector.collect([prompt(uid) for uid in "01"], 2, PARAMS, Quiet(), Admission(0)))
    assert seen == [["0", "0"], ["1", "1"]]
    assert [group.rewards for group in groups] == [[10.0, 11.0]] * 2
    assert not any(each.loss_mask.any() for group in groups for each in group.samples)
    assert len(collector.requests) == 0


def test_a_trainers_postprocessing_also_changes_the_greedy_response():
    async def rollout(prompt: Prompt, params: SamplingParams, engines: Engines) -> Sample:
        return sample(1.0)

    def hook(output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        assert len(uids) == len(output["rewards"])
        output["rewards"] = [10 * reward for reward in output["rewards"]]  # type: ignore[operator]
        return output

    inner = Collector(rollout, World().evaluating.engines)
    collector = Postprocessed(inner, hook, lambda: False, filters=False, zeroes_unfinished=False)
    (group,) = asyncio.run(collector.collect([prompt("0")], 2, PARAMS, Quiet(), Admission(0), with_greedy=True))
    assert group.rewards == [10.0, 10.0] and [each.reward for each in group.greedy] == [10.0]


@pytest.mark.parametrize(
    ("options", "given", "trained"),
    [
        ({"filters": False, "zeroes_unfinished": False}, [[1.0, 1.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 3.0]]),
        ({"filters": True, "zeroes_unfinished": False}, [[1.0, 2.0]], [[1.0, 1.0], [1.0, 3.0]]),
        ({"filters": True, "zeroes_unfinished": True}, [[0.0, 1.0], [0.0, 2.0]], [[0.0, 2.0], [0.0, 3.0]]),
    ],
)
def test_a_trainers_postprocessing_comes_after_filters_and_zeroed_rewards(
    options: dict[str, bool], given: list[list[float]], trained: list[list[float]]
):
    def rewards(output: GeneratorOutput) -> None:
        is_equal = output["prompt_token_ids"][0] == TOKENIZER.encode("0")
        output["rewards"] = [1.0, 1.0 if is_equal else 2.0]
        output["stop_reasons"] = ["length", "stop"]

    def hook(output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        seen.append(list(output["rewards"]))
        output["rewards"][1] += 1  # type: ignore[operator]
        return output

    world, seen = World(), list[Any]()
    world.generator.change = rewards  # type: ignore[attr-defined]
    collector = Postprocessed(world.training(), hook, lambda: False, **options)
    groups = asyncio.run(collector.collect([prompt(uid) for uid in "01"], 2, PARAMS, Quiet(), Admission(0)))
    assert seen == given and [group.rewards for group in groups] == trained


def test_a_trainers_postprocessing_gets_rewards_of_the_generators_kind():
    def lists(output: GeneratorOutput) -> None:
        output["rewards"] = [[0.0] * len(response) for response in output["response_ids"]]

    def hook(output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        seen.append(output["rewards"])
        return output

    world, seen = World(), list[Any]()
    inner = world.training()
    collector = Postprocessed(inner, hook, lambda: inner.gives_token_rewards, filters=False, zeroes_unfinished=False)
    asyncio.run(collector.collect([prompt("0")], 2, PARAMS, Quiet(), Admission(0)))
    world.generator.change = lists  # type: ignore[attr-defined]
    asyncio.run(collector.collect([prompt("0")], 2, PARAMS, Quiet(), Admission(0)))
    assert seen == [[1.0, 1.0], [[0.0], [0.0]]]


def test_a_row_may_be_a_task_that_is_not_a_conversation():
    class Tasks(Single):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            self.inputs.append(input_batch)
            size = len(input_batch["prompts"])
            return GeneratorOutput(
                prompt_token_ids=[[1]] * size, response_ids=[[4]] * size, rewards=[1.0] * size, loss_masks=[[1]] * size
            )

    world = World(generator=Tasks())
    row = Prompt("0", "tasks/hello", "", {}, "unknown")  # type: ignore[arg-type]
    made = world.training(needs=False).collect([row], 2, PARAMS, Quiet(), Admission(0))
    (group,) = asyncio.run(made)
    assert world.generator.inputs[0]["prompts"] == ["tasks/hello"] * 2  # type: ignore[attr-defined]
    assert group.samples[0].policy_version == -1 and group.rewards == [1.0, 1.0]


def test_groups_that_a_step_does_not_need_are_cancelled_and_counted():
    class Stuck(Single):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            ids = input_batch["trajectory_ids"] or []
            if int(ids[0].instance_id) % 2:
                await asyncio.Future()
            return await super().generate(input_batch)

    async def wake() -> None:
        """The engines of a test need no waking."""

    overrides = [
        *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "trainer.over_sampling_batch_size=6"),
        "generator.n_samples_per_prompt=2",
    ]
    parts = SourceParts(
        config=load_config(overrides),
        prompts=[prompt(str(number)) for number in range(6)],
        sampling_params=PARAMS,
        collector=World(generator=Stuck()).training(),
        progress=Quiet(),
        timers=Timers(),
        wake_engines=wake,
    )
    source = OverSamplingSource(parts)
    groups = asyncio.run(source.next())
    assert len(groups) == 2 and all(int(group.prompt.uid) % 2 == 0 for group in groups)
    ledger = source._admission.ledger
    assert (ledger.generated, ledger.trained, ledger.waiting, ledger.cancelled) == (6, 2, 0, 4)
