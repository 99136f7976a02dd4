import asyncio
import sys
import threading
import time
from dataclasses import replace

import pytest
import skyrl_gym
import torch
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.contract import GenerationAborted, Requests
from skyrl_train.rollout.env_pool import WORKER_NAME
from skyrl_train.rollout.episode import EnvironmentFailure
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Generation, Prompt
from tests.support.scripted import PARAMS, NeverAnswers, Script, prompt, sampler
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer


def play(script, some_prompt, **options):
    with sampler(script.tokenizer, script, **options) as s:
        return asyncio.run(s.sample(some_prompt, PARAMS))


def output(observations=(), reward=0.0, done=False):
    return BaseTextEnvStepOutput(observations=list(observations), reward=reward, done=done, metadata={})


@pytest.fixture
def register():
    """Registers an environment class for one test, under the name "probe"."""

    def add(env_type):
        skyrl_gym.register(id="probe", entry_point=env_type)

    yield add
    skyrl_gym.registry.pop("probe", None)


class Probe(BaseTextEnv):
    """Never done; keeps what it was made with and every instance."""

    made: list["Probe"]

    def __init_subclass__(cls):
        cls.made = []

    def __init__(self, env_config, extras):
        super().__init__()
        self.env_config, self.extras, self.closed = env_config, extras, 0
        type(self).made.append(self)

    def step(self, action):
        return output()

    def close(self):
        self.closed += 1


def test_one_turn_sample_holds_prompt_and_answer_with_its_logprobs():
    tokenizer = tiny_tokenizer()
    script = Script(tokenizer, "85<eos>")
    script.versions = iter([4])
    sample = play(script, prompt("addition", "37+48=", "85"))
    assert tokenizer.decode(sample.token_ids) == "37+48=85<eos>"
    assert sample.token_ids.dtype == torch.int64
    assert sample.loss_mask.tolist() == [False] * 6 + [True] * 3
    assert sample.rollout_logprobs.tolist() == [0.0] * 6 + [-0.5, -1.5, -2.5]
    assert (sample.prompt_length, sample.reward, sample.stop_reason) == (6, 1.0, "stop")
    assert (sample.turns, sample.policy_version) == (1, 4)
    assert [m["content"] for m in sample.transcript] == ["37+48=", "85"]


@pytest.mark.parametrize("ends_itself", [True, False])
def test_two_turn_sample_equals_the_chat_templates_rendering_and_only_answers_are_trained_on(ends_itself):
    tokenizer = chatml_tokenizer()
    script = Script(tokenizer, "5<|im_end|>" if ends_itself else "5", "7<|im_end|>")
    script.versions = iter([3, 4])
    sample = play(script, prompt("guess_number"))
    conversation = [
        {"role": "user", "content": "guess:"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
    ]
    whole = tokenizer.apply_chat_template(conversation, return_dict=False)
    assert sample.token_ids.tolist() == whole[:-1]  # but for the newline that the template puts after the end of turn
    assert sample.transcript == conversation
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == ("5<|im_end|>7<|im_end|>" if ends_itself else "57<|im_end|>")
    sampled = [-0.5, -1.5] if ends_itself else [-0.5]
    assert sample.rollout_logprobs[sample.loss_mask].tolist() == [*sampled, -0.5, -1.5]
    assert (sample.rollout_logprobs[~sample.loss_mask] == 0).all()
    assert (sample.reward, sample.turns, sample.policy_version) == (1.0, 2, 3)
    first = 1 + ends_itself
    assert sample.version_spans == ((3, first), (4, 2)), "a version for each token that the policy wrote"
    assert sample.env_metrics == {"turns": 2}


def test_messages_are_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads, encode = [], ChatTemplate.encode

    def noted(self, text):
        threads.append(threading.current_thread().name)
        return encode(self, text)

    monkeypatch.setattr(ChatTemplate, "encode", noted)
    play(Script(chatml_tokenizer(), "5", "7"), prompt("guess_number"))
    assert len(threads) > 1 and {*threads} == {WORKER_NAME}


def test_next_turn_continues_from_exactly_the_tokens_that_were_sampled():
    tokenizer = tiny_tokenizer()
    strange = [tokenizer.convert_tokens_to_ids(t) for t in ("5", "<unk>", "<bos>")]
    script = Script(tokenizer, "7")

    async def generate(token_ids, params, route_key):
        generation = await script(token_ids, params, route_key)
        if len(script.inputs) > 1:
            return generation
        return type(generation)(strange, [-1.0] * 3, "5", "stop", 0)

    with sampler(tokenizer, generate) as s:
        sample = asyncio.run(s.sample(prompt("guess_number"), PARAMS))
    assert script.inputs[1] == script.inputs[0] + strange + tokenizer.encode("higher")
    assert sample.token_ids.tolist() == script.inputs[1] + tokenizer.encode("7")


def test_sample_ends_after_max_turns_without_the_environments_last_words(register):
    class Talkative(Probe):
        def step(self, action):
            return output([{"role": "user", "content": "more!"}], reward=0.25)

    register(Talkative)
    tokenizer = tiny_tokenizer()
    sample = play(Script(tokenizer, "a", "b", "c", "d"), prompt("probe"), max_turns=3)
    assert tokenizer.decode(sample.token_ids) == "guess:amore!bmore!c"
    assert (sample.turns, sample.reward) == (3, 0.75)
    assert Talkative.made[0].extras["max_turns"] == 3
    assert [env.closed for env in Talkative.made] == [1]


@pytest.mark.parametrize(("limit", "turns"), [(4, 0), (5, 0), (6, 1), (12, 1), (13, 2)])
def test_conversation_that_outgrows_max_input_length_ends_before_its_next_turn(limit, turns):
    tokenizer = tiny_tokenizer()  # guess: is 6 tokens, with 5 and higher 13
    sample = play(Script(tokenizer, "5", "7"), prompt("guess_number"), max_input_length=limit)
    assert sample.turns == turns
    assert sample.stop_reason == ("stop" if turns == 2 else "length")
    assert tokenizer.decode(sample.token_ids) == ["guess:"[:limit], "guess:5", "guess:5higher7"][turns]
    assert int(sample.loss_mask.sum()) == turns
    assert sample.reward == (1.0 if turns == 2 else 0.0)
    assert sample.env_metrics == {"turns": turns}


def test_the_end_of_an_environments_call_is_progress(monkeypatch: pytest.MonkeyPatch):
    ends = []
    monkeypatch.setattr(Requests, "note_progress", lambda self: ends.append(self))
    play(Script(tiny_tokenizer()), prompt("guess_number"), max_input_length=4)
    assert len(ends) == 2, "start and finish"


def test_stop_reason_is_that_of_the_last_generation():
    script = Script(tiny_tokenizer(), "85")
    script.stop_reason = "length"
    assert play(script, prompt("addition")).stop_reason == "length"


def test_environment_may_change_the_prompt_and_reads_its_settings_as_attributes(register):
    class Wordy(Probe):
        def init(self, messages):
            return [{"role": "system", "content": self.env_config.motto}, *messages], {}

    register(Wordy)
    tokenizer = tiny_tokenizer()
    sample = play(Script(tokenizer, "a"), prompt("probe"), max_turns=1, env_kwargs={"probe": {"motto": "be kind. "}})
    assert tokenizer.decode(sample.token_ids) == "be kind. guess:a"
    assert sample.prompt_length == 15


def test_named_rewards_of_turns_add_up(register):
    class Names(Probe):
        def step(self, action):
            self.turns += 1
            named = {"format": 0.5} | ({"correct": 1.0} if self.turns == 2 else {})
            return {**output(reward=0.25, done=self.turns == 2), "metadata": {"rewards": named}}

    register(Names)
    sample = play(Script(chatml_tokenizer(), "a", "b"), prompt("probe"), max_turns=3)
    assert sample.named_rewards == {"format": 1.0, "correct": 1.0} and sample.reward == 0.5


class RewardsTwice(Probe):
    def step(self, action):
        return {**output(), "metadata": {"rewards": [1.0, 2.0]}}


class Raises(Probe):
    def step(self, action):
        self.turns += 1
        return {}["boom"] if self.turns == 2 else output()


class Exits(Probe):
    def init(self, messages):
        sys.exit(3)


class IsCancelled(Probe):
    def step(self, action):
        raise asyncio.CancelledError("the client's connection")


class IsInterrupted(Probe):
    def get_metrics(self):
        raise KeyboardInterrupt

    def step(self, action):
        return output(done=True)


class ReturnsNothing(Probe):
    def step(self, action):
        return None


class RewardsNan(Probe):
    def step(self, action):
        return output(reward=float("nan"))


class RewardsNothing(Probe):
    def step(self, action):
        return output(reward=None)


class NamesNothing(Probe):
    def step(self, action):
        return {**output(), "metadata": {"rewards": {"format": None}}}


class BeginsWithNothing(Probe):
    def init(self, prompt):
        return None


class BeginsWithMessages(Probe):
    def init(self, prompt):
        return prompt


class ReturnsText(Probe):
    def step(self, action):
        return {**output(), "observations": "go on"}


class ClosesBadly(Probe):
    def close(self):
        super().close()
        raise OSError("cannot close")


class TimesOutItself(Probe):
    def step(self, action):
        raise TimeoutError("the judge does not answer")


@pytest.mark.parametrize(
    ("env_type", "problem"),
    [
        (Raises, r"failed in env.step \(prompt 17, turn 2\): KeyError: 'boom' \(.*test_rollout_sample.py:\d+\)"),
        (Exits, r"failed in env.init \(prompt 17, turn 0\): SystemExit: 3"),
        (IsCancelled, r"failed in env.step .*turn 1\): CancelledError: the client's connection \(.*sample.py:\d+\)"),
        (IsInterrupted, r"failed in env.get_metrics .*KeyboardInterrupt"),
        (
            ReturnsNothing,
            r"failed in env.step .*turn 1\): ValueError: step must return a BaseTextEnvStepOutput .* got None",
        ),
        (RewardsTwice, r"failed in env.step .*rewards \[1.0, 2.0\]: return a dict of numbers by name"),
        (RewardsNan, r"failed in env.step .*rewards must be finite"),
        (
            RewardsNothing,
            r"failed in env.step .*ValueError: step returned reward NoneType None; rewards must be numbers",
        ),
        (
            NamesNothing,
            r"failed in env.step .*ValueError: step returned named reward format NoneType None; rewards must",
        ),
        (BeginsWithNothing, r"failed in env.init .*ValueError: init must return \(messages, info\), got NoneType None"),
        (
            BeginsWithMessages,
            r"failed in env.init .*must return \(messages, info\), got list .*Write `return prompt, {}`",
        ),
        (ReturnsText, r"failed in env.step .*expected a list of chat messages, got str 'go on'"),
        (ClosesBadly, r"failed in env.close .*OSError: cannot close"),
        (TimesOutItself, r"failed in env.step .*TimeoutError: the judge does not answer"),
    ],
)
def test_environment_that_misbehaves_fails_with_one_error_that_says_where_and_is_closed(register, env_type, problem):
    env_type.made.clear()
    register(env_type)
    with pytest.raises(EnvironmentFailure, match=f"^environment 'probe' {problem}") as raised:
        play(Script(tiny_tokenizer(), "a"), prompt("probe", uid="17"))
    assert (raised.value.env_class, raised.value.uid) == ("probe", "17")
    assert raised.value.__cause__ is not None
    assert [env.closed for env in env_type.made] == [1]


def test_unknown_environment_is_an_environment_failure_that_names_the_nearest():
    with pytest.raises(EnvironmentFailure, match="unknown environment 'addtion' .did you mean addition"):
        play(Script(tiny_tokenizer(), "a"), prompt("addtion"))


def test_hanging_environment_fails_at_its_deadline(register):
    released = threading.Event()

    class Hangs(Probe):
        def step(self, action):
            released.wait(60)

    register(Hangs)
    start_s = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="env.step .*turn 1.: still running after 1 s .*step_timeout_s"):
        play(Script(tiny_tokenizer(), "a"), prompt("probe"), timeout_s=1.0)
    assert time.monotonic() - start_s < 30.0
    released.set()


@pytest.mark.parametrize("call", ["__init__", "init", "step", "get_metrics"])
def test_an_environment_whose_call_timed_out_is_closed_when_the_call_returns(register, call):
    released = threading.Event()

    def hangs(name):
        if call == name:
            released.wait(60)

    class Late(Probe):
        def __init__(self, env_config, extras):
            super().__init__(env_config, extras)
            hangs("__init__")

        def init(self, messages):
            hangs("init")
            return messages, {}

        def step(self, action):
            hangs("step")
            return output(done=call != "step")

        def get_metrics(self):
            hangs("get_metrics")
            return {}

        def close(self):
            super().close()
            closed.set()

    async def main(s):
        with pytest.raises(EnvironmentFailure, match="still running after 1 s"):
            await s.sample(prompt("probe"), PARAMS)
        await asyncio.sleep(0.1)
        assert [env.closed for env in Late.made] == [0], "never while another call of it runs"
        released.set()
        assert await asyncio.to_thread(closed.wait, 30)

    register(Late)
    closed = threading.Event()
    with sampler(tiny_tokenizer(), Script(tiny_tokenizer(), "a"), timeout_s=1.0) as s:
        asyncio.run(main(s))
    assert [env.closed for env in Late.made] == [1]


def test_replies_that_the_template_refuses_are_the_environments_failure(register):
    class Robot(Probe):
        def step(self, action):
            return output([{"role": "tool", "content": "x"}])

    register(Robot)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(EnvironmentFailure, match="cannot be rendered for the policy: .*no tools"):
        play(Script(tokenizer, "a"), prompt("probe"))
    assert [env.closed for env in Robot.made] == [1]


def test_aborted_generation_raises_and_closes_the_environment(register):
    class Quiet(Probe):
        pass

    register(Quiet)
    script = Script(tiny_tokenizer(), "")
    script.stop_reason = "abort"
    with pytest.raises(GenerationAborted, match="aborted turn 1 of a sample of prompt 0"):
        play(script, prompt("probe"))
    assert [env.closed for env in Quiet.made] == [1]


@pytest.mark.parametrize("moment", ["init", "generate"])
def test_cancelled_sample_closes_its_environment_even_while_it_is_being_made(register, moment):
    entered = threading.Event()

    class Slow(Probe):
        def init(self, messages):
            entered.set()
            time.sleep(0.2)
            return messages, {}

    async def main(s, generate):
        task = asyncio.ensure_future(s.sample(prompt("probe"), PARAMS))
        await generate.until_asked(1) if moment == "generate" else await asyncio.to_thread(entered.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    register(Slow)
    generate = NeverAnswers()
    with sampler(tiny_tokenizer(), generate) as s:
        asyncio.run(main(s, generate))
    assert [env.closed for env in Slow.made] == [1]


def test_a_failure_of_an_environment_names_the_file_and_line_of_the_row(register):
    register(Raises)
    own = replace(prompt("probe", uid="17"), location="rows.jsonl, line 18")
    with pytest.raises(EnvironmentFailure, match=r"failed in env.step \(prompt 17 from rows.jsonl, line 18, turn 2\)"):
        play(Script(tiny_tokenizer(), "a"), own)


def test_extras_of_the_prompt_are_not_changed_by_max_turns():
    some_prompt = Prompt(
        "0", [{"role": "user", "content": "x"}], "addition", {"reward_spec": {"ground_truth": "1"}}, ""
    )
    play(Script(tiny_tokenizer(), "1"), some_prompt)
    assert "max_turns" not in some_prompt.extras


def test_spans_of_one_version_are_joined_over_turns_and_those_of_a_generation_are_kept():
    trace = Trace()
    trace.read([7, 7])
    trace.write(Generation([1, 1], [-1.0, -1.0], "", "stop", 2))
    trace.read([7])
    trace.write(Generation([1, 1, 1], [-1.0] * 3, "", "length", 2, version_spans=((2, 1), (5, 2))))
    trace.read([7, 7, 7])
    sample = trace.to_sample()
    assert sample.version_spans == ((2, 3), (5, 2))
    assert sample.policy_version == 2
    assert sample.token_ids.tolist() == [7, 7, 1, 1, 7, 1, 1, 1], "what is read after the last answer is left out"
    assert sum(length for _, length in sample.version_spans) == int(sample.loss_mask.sum())


def test_every_environment_finds_the_users_own_values_beside_its_own(register):
    class ReadsExtra(Probe):
        pass

    register(ReadsExtra)
    for env_kwargs in ({}, {"probe": {"motto": "be kind"}}):
        play(Script(tiny_tokenizer(), "a"), prompt("probe"), max_turns=1, env_kwargs=env_kwargs, extra={"judge": "me"})
    plain, with_own = ReadsExtra.made
    assert plain.env_config.extra.judge == with_own.env_config.extra.judge == "me"
    assert with_own.env_config.motto == "be kind"


def test_an_environment_that_writes_into_its_prompt_changes_no_other_rollout(register):
    class Hints(Probe):
        def init(self, messages):
            messages[-1]["content"] += " think."
            return messages, {}

    register(Hints)
    tokenizer, shared = tiny_tokenizer(), prompt("probe")
    first, second = (play(Script(tokenizer, "a"), shared, max_turns=1) for _ in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert tokenizer.decode(first.token_ids).count("think.") == 1 and "think." not in str(shared.messages)
