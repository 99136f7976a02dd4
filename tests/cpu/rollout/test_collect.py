import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import skyrl_gym
import torch
from skyrl_gym.envs.base_text_env import BaseTextEnv

from skyrl_train.rollout.admission import Admission, Failure
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.episode import EnvironmentFailure
from skyrl_train.rollout.metrics import evaluation_metrics, rollout_metrics
from skyrl_train.rollout.seeds import seed
from skyrl_train.types import Generation, Group, Prompt, Sample, final_reward
from tests.support.rollouts import engines_of
from tests.support.rollouts import sample as rolled_out
from tests.support.scripted import PARAMS, NeverAnswers, prompt, sampler
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class Tally:
    """A progress bar that keeps what it was told."""

    def __init__(self):
        self.events = []

    def start(self, total):
        self.events.append(total)

    def advance(self, samples):
        self.events.append(samples[-1].reward)

    def stop(self):
        self.events.append("stop")


def sums(n):
    return [prompt("addition", f"{i}+1=", str(i + 1), uid=str(i)) for i in range(n)]


def collect(generate, prompts, n_samples=2, progress=None):
    with sampler(TOKENIZER, generate) as s:
        return asyncio.run(s.collector.collect(prompts, n_samples, PARAMS, progress or Tally(), Admission(0)))


async def answers_late_first(token_ids, params, route_key):
    """The right answer to `a+1=`; the earlier the prompt, the later it comes."""
    await asyncio.sleep(0.05 - 0.005 * int(route_key))
    ids = TOKENIZER.encode(str(int(route_key) + 1))
    return Generation(ids, [-1.0] * len(ids), TOKENIZER.decode(ids), "stop", 0)


def test_groups_come_in_the_order_of_the_prompts_whatever_finishes_first():
    groups = collect(answers_late_first, sums(8))
    assert [group.prompt.uid for group in groups] == [str(i) for i in range(8)]
    assert [TOKENIZER.decode(s.token_ids) for g in groups for s in g.samples] == [
        f"{i}+1={i + 1}" for i in range(8) for _ in range(2)
    ]


def test_all_samples_are_in_flight_at_once_and_those_of_a_prompt_share_its_route():
    in_flight, everyone, keys = 0, asyncio.Event(), []

    async def generate(token_ids, params, route_key):
        nonlocal in_flight
        in_flight += 1
        keys.append(route_key)
        assert params == PARAMS
        if in_flight == 12:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 5)
        return Generation([5], [-1.0], "1", "stop", 0)

    collect(generate, sums(4), n_samples=3)
    assert sorted(keys) == ["0"] * 3 + ["1"] * 3 + ["2"] * 3 + ["3"] * 3


def test_the_tail_begins_when_nine_of_ten_rollouts_have_ended(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("skyrl_train.rollout.collect.time", SimpleNamespace(monotonic=lambda: now))

    async def rollout(asked, params, engines):
        nonlocal now
        await asyncio.sleep(0)
        now = 3.0 * int(asked.uid) ** 2
        return rolled_out(1.0)

    collector = Collector(rollout, engines_of(None))
    assert collector.tail_s == 0
    for n_prompts, tail_s in ((20, 3 * (19**2 - 17**2)), (1, 0), (0, 0)):
        asyncio.run(collector.collect(sums(n_prompts), 1, PARAMS, Tally(), Admission(0)))
        assert collector.tail_s == tail_s


def asked_seeds(base, arrive_in_order, n_samples=2):
    """The seed of each request that three two-turn samples make: (route, turn) -> seeds of the samples."""
    asked = {}

    async def generate(token_ids, params, route_key):
        await asyncio.sleep(0.01 * (int(route_key) if arrive_in_order else 3 - int(route_key)))
        turn = len(token_ids)
        asked.setdefault((route_key, turn), []).append(params.seed)
        ids = TOKENIZER.encode("5")
        return Generation(ids, [-1.0], "5", "stop", 0)

    prompts = [prompt("guess_number", "guess:", "7", uid=str(i)) for i in range(3)]
    with sampler(TOKENIZER, generate) as s:
        asyncio.run(s.collector.collect(prompts, n_samples, replace(PARAMS, seed=base), Tally(), Admission(0)))
    return {where: sorted(seeds, key=str) for where, seeds in asked.items()}


def test_each_request_has_a_seed_of_its_own_that_does_not_depend_on_the_order_of_arrival():
    asked = asked_seeds(1, arrive_in_order=True)
    seeds = [seed for of_turn in asked.values() for seed in of_turn]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 2  # prompts, samples, turns
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert asked_seeds(1, arrive_in_order=False) == asked
    assert asked_seeds(1, arrive_in_order=True, n_samples=3).items() != asked.items()
    assert not set(seeds) & {seed for of_turn in asked_seeds(2, arrive_in_order=True).values() for seed in of_turn}


def test_samples_without_a_seed_ask_without_one():
    assert {seed for seeds in asked_seeds(None, arrive_in_order=True).values() for seed in seeds} == {None}


def test_a_seed_is_the_same_on_every_machine():
    assert seed("train", 1, 0) == 3008800958686597820


def test_progress_counts_every_sample():
    tally = Tally()
    collect(answers_late_first, sums(3), progress=tally)
    assert tally.events == [6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, "stop"]


def test_no_prompts_give_no_groups():
    assert collect(answers_late_first, []) == []


@pytest.fixture
def fails_for_three():
    """An environment whose init fails where the ground truth is 3, after `others_wait` has been set."""
    others_wait = threading.Event()

    class FailsForThree(BaseTextEnv):
        def __init__(self, env_config, extras):
            super().__init__()
            self.number = extras["reward_spec"]["ground_truth"]

        def init(self, messages):
            if self.number == 3:
                others_wait.wait(10)
                raise ConnectionError("no sandbox")
            return messages, {}

    skyrl_gym.register(id="fails_for_three", entry_point=FailsForThree)
    yield others_wait
    skyrl_gym.registry.pop("fails_for_three")


def test_failing_environment_ends_the_collection_at_once_and_the_others_are_cancelled(fails_for_three):
    generate, tally = NeverAnswers(), Tally()

    async def main(s):
        prompts = [prompt("fails_for_three", ground_truth=i, uid=str(i)) for i in range(6)]
        task = asyncio.ensure_future(s.collector.collect(prompts, 1, PARAMS, tally, Admission(0)))
        await generate.until_asked(5)
        fails_for_three.set()
        with pytest.raises(EnvironmentFailure, match="prompt 3, turn 0.: ConnectionError: no sandbox"):
            await asyncio.wait_for(task, 10)
        return sorted(generate.cancelled)  # now, before the loop ends and cancels what is left

    with sampler(TOKENIZER, generate, timeout_s=30) as s:
        assert asyncio.run(main(s)) == ["0", "1", "2", "4", "5"]
    assert tally.events == [6, "stop"]


def test_cancelled_collection_cancels_its_samples():
    generate = NeverAnswers()

    async def main(s):
        task = asyncio.ensure_future(s.collector.collect(sums(3), 1, PARAMS, Tally(), Admission(0)))
        await generate.until_asked(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sorted(generate.cancelled)

    with sampler(TOKENIZER, generate) as s:
        assert asyncio.run(main(s)) == ["0", "1", "2"]


def made_group(*samples, env_class="addition", data_source="sums"):
    """A group whose samples have the given (written tokens, reward, ...)."""
    return Group(
        prompt=Prompt("0", [], env_class, {}, data_source),
        samples=tuple(
            Sample(
                token_ids=torch.zeros(3 + written, dtype=torch.int64),
                loss_mask=torch.tensor([False] * 3 + [True] * written),
                rollout_logprobs=torch.zeros(3 + written),
                prompt_length=3,
                rewards=final_reward(3 + written, reward),
                stop_reason=more.get("stop_reason", "stop"),
                turns=more.get("turns", 1),
                policy_version=0,
                env_metrics=more.get("env_metrics", {}),
            )
            for written, reward, more in [(*s, {})[:3] for s in samples]
        ),
    )


def test_rollout_metrics_have_the_hand_computed_values():
    groups = [
        made_group((2, 1.0), (4, 0.0)),
        made_group((6, -1.0), (8, 0.0, {"stop_reason": "length", "turns": 3})),
    ]
    assert rollout_metrics(groups) == pytest.approx(
        {
            "generate/batch_num_seq": 4,
            "generate/min_num_tokens": 2,
            "generate/max_num_tokens": 8,
            "generate/avg_num_tokens": 5,
            "generate/std_num_tokens": 5**0.5,
            "generate/avg_tokens_non_zero_rewards": 2,
            "generate/avg_tokens_zero_rewards": 6,
            "generate/share_stopped_by_length": 0.25,
            "generate/avg_turns": 1.5,
            "reward/avg_raw_reward": 0,
            "reward/avg_pass_at_2": 0.5,
            "reward/mean_positive_reward": 0.25,
        }
    )


def test_averages_over_no_samples_are_zero():
    metrics = rollout_metrics([made_group((2, -1.0))])
    assert metrics["generate/avg_tokens_non_zero_rewards"] == metrics["generate/avg_tokens_zero_rewards"] == 0


def test_groups_of_unlike_size_have_a_pass_rate_for_each_size_and_means_over_samples():
    groups = [
        made_group((1, 1.0), (1, 0.0)),
        made_group((1, 0.0), (1, -1.0)),
        made_group((1, 0.0), (1, 0.0), (1, 4.0)),
    ]
    metrics = rollout_metrics(groups)
    assert {name: metrics[name] for name in metrics if "pass" in name} == {
        "reward/avg_pass_at_2": 0.5,
        "reward/avg_pass_at_3": 1.0,
    }
    assert metrics["reward/avg_raw_reward"] == 4 / 7 and metrics["reward/mean_positive_reward"] == 5 / 7


def test_environments_metrics_are_aggregated_by_their_own_class():
    two_turns = {"env_metrics": {"turns": 2, "note": "x"}}
    groups = [made_group((1, 0.0, two_turns), (1, 0.0, {"env_metrics": {"turns": 1}}), env_class="guess_number")]
    assert rollout_metrics(groups)["environment/turns"] == 1.5
    groups += [
        made_group(
            (1, 0.0, {"env_metrics": {"steps": 4}}),
            (1, 0.0, {"env_metrics": {"steps": 2}}),
            env_class="gsm8k_multi_turn",
        )
    ]
    assert rollout_metrics(groups)["environment/avg_steps"] == 3.0


def test_environments_metrics_of_the_same_name_are_kept_apart():
    measured = {"env_metrics": {"turns": 2}}
    groups = [made_group((1, 0.0, measured), env_class=name) for name in ("guess_number", "addition")]
    metrics = rollout_metrics(groups)
    assert metrics["environment/guess_number/turns"] == metrics["environment/addition/turns"] == 2.0
    assert "environment/turns" not in metrics


def test_an_evaluation_whose_groups_all_failed_has_no_score():
    assert evaluation_metrics([]) == {}


def test_evaluation_metrics_are_given_for_all_and_for_each_data_source():
    groups = [
        made_group((1, 1.0), (1, 0.0), data_source="sums"),
        made_group((1, 0.0), (1, 0.0), data_source="sums"),
        made_group((1, 1.0), (1, -2.0), data_source="openai/gsm8k"),
    ]
    root = 3**0.5
    assert evaluation_metrics(groups) == pytest.approx(
        {
            "eval/all/avg_score": 0.0,
            "eval/all/avg_score_stderr": 0.5 / root,  # of 0.5, 0 and -0.5
            "eval/all/pass_at_1": 1 / 3,
            "eval/all/pass_at_1_stderr": (1 / 12) ** 0.5 / root,  # of 0.5, 0 and 0.5
            "eval/all/pass_at_2": 2 / 3,
            "eval/all/pass_at_2_stderr": (1 / 3) ** 0.5 / root,  # of 1, 0 and 1
            "eval/all/mean_positive_reward": 2 / 6,
            "eval/sums/avg_score": 0.25,
            "eval/sums/avg_score_stderr": 0.25,
            "eval/sums/pass_at_1": 0.25,
            "eval/sums/pass_at_1_stderr": 0.25,
            "eval/sums/pass_at_2": 0.5,
            "eval/sums/pass_at_2_stderr": 0.5,
            "eval/sums/mean_positive_reward": 0.25,
            "eval/openai_gsm8k/avg_score": -0.5,
            "eval/openai_gsm8k/pass_at_1": 0.5,
            "eval/openai_gsm8k/pass_at_2": 1.0,
            "eval/openai_gsm8k/mean_positive_reward": 0.5,
        }
    )


def test_a_dense_reward_passes_above_the_threshold():
    groups = [made_group((1, 0.14), (1, 0.0)), made_group((1, 0.6), (1, 0.5))]
    assert evaluation_metrics(groups)["eval/all/pass_at_2"] == rollout_metrics(groups)["reward/avg_pass_at_2"] == 1.0
    assert evaluation_metrics(groups, 0.5)["eval/all/pass_at_2"] == 0.5
    assert evaluation_metrics(groups, 0.5)["eval/all/pass_at_1"] == 0.25
    assert rollout_metrics(groups, 0.5)["reward/avg_pass_at_2"] == 0.5


def test_an_evaluation_has_the_metrics_of_the_environments():
    measured = [(1, 0.0, {"env_metrics": {"turns": turns}}) for turns in (2, 1)]
    metrics = evaluation_metrics([made_group(*measured, env_class="guess_number")])
    assert metrics["eval/all/environment/turns"] == 1.5


def test_a_greedy_response_joins_the_group_untrained_and_its_failure_is_the_groups():
    async def generate(token_ids, params, route_key):
        answer = str(int(route_key) + 1) if params.temperature == 0 else "0"
        ids = TOKENIZER.encode(answer)
        return Generation(ids, [-1.0] * len(ids), answer, "stop", 0)

    progress = Tally()
    with sampler(TOKENIZER, generate) as s:
        collected = s.collector.collect(sums(2), 2, PARAMS, progress, Admission(0), with_greedy=True)
        groups = asyncio.run(collected)
    assert progress.events[0] == 6
    assert [[sample.reward for sample in group.samples] for group in groups] == [[0.0, 0.0]] * 2
    assert [[sample.reward for sample in group.greedy] for group in groups] == [[1.0], [1.0]]


def test_a_group_whose_greedy_response_failed_has_failed():
    ids = torch.tensor([1, 2])
    made = [Sample(ids, ids > 1, torch.zeros(2), 1, final_reward(2, 1.0), "stop", 1, 0)]
    admission = Admission(0.5)
    failure = Failure("0", KeyError("no sandbox"))
    assert admission.finish(sums(1)[0], [made, made], failure) is None
    assert admission.ledger.failed == 1
    group = admission.finish(sums(1)[0], [made, made], made)
    assert group is not None and len(group.samples) == 2 and len(group.greedy) == 1


def test_a_data_source_hides_neither_the_score_of_all_nor_that_of_another_source():
    groups = [
        made_group((1, 0.0), data_source="all"),
        *(made_group((1, 1.0), data_source="math") for _ in range(3)),
        made_group((1, 0.0), data_source="a/b"),
        made_group((1, 1.0), data_source="a_b"),
        made_group((1, 0.0), data_source="c/d"),
    ]
    metrics = evaluation_metrics(groups)
    assert metrics["eval/all/avg_score"] == pytest.approx(4 / 7)
    assert (metrics["eval/a_b/avg_score"], metrics["eval/a__b/avg_score"]) == (1.0, 0.0)
    assert metrics["eval/c_d/avg_score"] == 0.0
