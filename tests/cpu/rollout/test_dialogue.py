"""The three forms of a conversation: what the engine is given is what is trained, token for token."""

import asyncio
import json
import re
from itertools import chain
from pathlib import Path

import pytest
import skyrl_gym
import torch
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.config import load_config
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.dialogue import ChatDialogue, OneMessageDialogue, StepWiseDialogue, dialogue_class
from skyrl_train.rollout.streaming.saved_groups import SavedGroup, from_bytes, to_bytes
from skyrl_train.types import Generation, Group
from tests.support.realistic import FAMILIES, realistic_tokenizer
from tests.support.scripted import PARAMS, Script, prompt, sampler
from tests.support.tiny import chatml_tokenizer

THOUGHT = "<think>\nwhat now\n</think>\n\n"
REWARDS = (0.25, 0.5, 1.0)


class Three(BaseTextEnv):
    """Answers twice, rewards each of three turns, and names the rewards."""

    reply_role = "user"

    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        reward, self.turns = REWARDS[self.turns], self.turns + 1
        answers = [{"role": self.reply_role, "content": f"reply {self.turns} "}]
        done = self.turns == 3
        metadata = {"rewards": {"r": reward}}
        return BaseTextEnvStepOutput(observations=[] if done else answers, reward=reward, done=done, metadata=metadata)

    def get_metrics(self):
        return {"turns": self.turns}


class ThreeOfATool(Three):
    reply_role = "tool"


@pytest.fixture(autouse=True)
def registered():
    skyrl_gym.register(id="three", entry_point=Three)
    skyrl_gym.register(id="three_of_a_tool", entry_point=ThreeOfATool)
    yield
    for name in ("three", "three_of_a_tool"):
        skyrl_gym.registry.pop(name)


def play(family, texts, dialogue, env_class="three", **options):
    """The samples of an episode, the requests of the engine, and the tokenizer."""
    tokenizer = realistic_tokenizer(family)
    script = Script(tokenizer, *(text + tokenizer.eos_token for text in texts))
    script.versions = iter([5, 6, 7])
    with sampler(tokenizer, script, max_turns=3, dialogue=dialogue, **options) as playing:
        return asyncio.run(playing.samples(prompt(env_class), PARAMS)), script.inputs, tokenizer


def rendered(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)


def conversation(texts, role="user"):
    messages = [{"role": "user", "content": "guess:"}]
    for turn, text in enumerate(texts, 1):
        messages += [{"role": "assistant", "content": text}, {"role": role, "content": f"reply {turn} "}]
    return messages


def sampled_tokens(sample):
    return sample.token_ids[sample.loss_mask].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_of_each_step_is_the_templates_rendering_of_all_messages_before_it(family):
    texts = [f"{THOUGHT}one ", f"{THOUGHT}two ", f"{THOUGHT}three"]
    samples, inputs, tokenizer = play(family, texts, StepWiseDialogue)
    for turn, (sample, asked, text) in enumerate(zip(samples, inputs, texts, strict=True)):
        assert asked == rendered(tokenizer, conversation(texts[:turn]))
        written = tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False)
        assert sample.token_ids.tolist() == asked + written
        assert (sampled_tokens(sample), sample.prompt_length) == (written, len(asked))
        assert sample.rollout_logprobs[sample.loss_mask].tolist() == [-0.5 - i for i in range(len(written))]
        assert sample.version_spans == ((5 + turn, len(written)),)
        assert sample.rewards.nonzero().tolist() == [[len(sample.token_ids) - 1]]
        assert (sample.reward, sample.named_rewards, sample.turns) == (REWARDS[turn], {"r": REWARDS[turn]}, 1)
    assert [sample.ends_conversation for sample in samples] == [False, False, True]
    assert [sample.env_metrics for sample in samples] == [{}, {}, {"turns": 3}]
    if family in ("qwen3", "deepseek_r1"):
        assert "what now" not in tokenizer.decode(inputs[2])  # thoughts of earlier turns
        assert inputs[2][: len(inputs[1])] != inputs[1] + sampled_tokens(samples[1])


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3", "deepseek_r1"])
def test_messages_of_tools_are_rendered_as_the_template_does(family):
    texts = ["<think>\nfirst\n</think>\n\none", "<think>\nsecond\n</think>\n\ntwo", "three"]
    samples, inputs, tokenizer = play(family, texts, StepWiseDialogue, "three_of_a_tool")
    assert inputs[2] == rendered(tokenizer, conversation(texts[:2], "tool"))
    if family == "qwen3":  # the last question is still the first, so its thoughts stay
        samples, appended, _ = play(family, texts, ChatDialogue, "three_of_a_tool")
        assert appended == inputs
        assert sampled_tokens(samples[0])[:1] == [tokenizer.convert_tokens_to_ids("<think>")]


# DeepSeek's generation prompt opens a thought, which the template drops from earlier turns.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_r1"])
def test_turns_appended_through_the_template_are_its_rendering_of_plain_conversations(family):
    texts = ["one", "two", "three"]
    (sample,), inputs, tokenizer = play(family, texts, ChatDialogue)
    assert inputs == [rendered(tokenizer, conversation(texts[:turn])) for turn in range(3)]
    end = tokenizer.eos_token
    assert tokenizer.decode(sampled_tokens(sample)) == f"one{end}two{end}three{end}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_in_one_message_is_the_prompt_and_then_all_texts(family):
    """Each text is tokenised alone, and the end of a response that is answered is dropped."""
    texts = ["one <search>x</search>", "two", "three"]
    (sample,), inputs, tokenizer = play(family, texts, OneMessageDialogue)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    parts = [encode(text) for text in (texts[0], "reply 1 ", texts[1], "reply 2 ", texts[2])]
    start = rendered(tokenizer, conversation([]))
    assert inputs == [start, start + parts[0] + parts[1], start + [*chain(*parts[:4])]]
    assert sample.token_ids.tolist() == start + [*chain(*parts)] + [tokenizer.eos_token_id]
    written = [[False] * len(start)] + [[index % 2 == 0] * len(part) for index, part in enumerate(parts)] + [[True]]
    assert sample.loss_mask.tolist() == [*chain(*written)]
    lengths = [len(part) for part in parts]
    assert sample.version_spans == ((5, lengths[0]), (6, lengths[2]), (7, lengths[4] + 1))
    assert sample.rollout_logprobs[~sample.loss_mask].tolist() == [0.0] * int((~sample.loss_mask).sum())
    ends = [sum(lengths[: turn + 1]) - 1 for turn in (0, 2)]
    rewards = torch.zeros(len(sample.token_ids), dtype=torch.float64)
    rewards[[len(start) + ends[0], len(start) + ends[1], -1]] = torch.tensor(REWARDS, dtype=torch.float64)
    assert sample.rewards.tolist() == rewards.tolist()
    assert (sample.turns, sample.named_rewards) == (3, {"r": sum(REWARDS)})


def test_a_response_of_nothing_but_its_end_leaves_its_reward_before_the_answer():
    (sample,), _, _ = play("chatml", ["", "two", "three"], OneMessageDialogue)
    assert sample.rewards[sample.prompt_length - 1] == REWARDS[0]
    assert sample.reward == sum(REWARDS)
    assert sample.version_spans[0][0] == 6


def test_turn_rewards_are_at_the_last_token_of_each_turn():
    (sample,), inputs, _ = play("chatml", ["one", "two", "three"], ChatDialogue)
    ends = [len(asked) + 1 for asked in inputs]  # one token of text and the end of the turn
    assert sample.rewards.nonzero().flatten().tolist() == ends
    assert sample.rewards[ends].tolist() == list(REWARDS)


@pytest.mark.parametrize("dialogue", [ChatDialogue, OneMessageDialogue, StepWiseDialogue])
def test_a_conversation_that_becomes_too_long_ends_with_its_last_response(dialogue):
    texts = ["one", "two", "three"]
    complete, inputs, _ = play("chatml", texts, dialogue)
    samples, cut, _ = play("chatml", texts, dialogue, max_input_length=len(inputs[2]) - 1)
    assert cut == inputs[:2]
    assert samples[-1].stop_reason == "length" and samples[-1].ends_conversation
    assert sum(sample.turns for sample in samples) == 2
    assert sum(sample.reward for sample in samples) == REWARDS[0] + REWARDS[1]
    assert samples[-1].env_metrics == {"turns": 2}
    if dialogue is StepWiseDialogue:
        assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in complete[:2]]
    (only,), none, _ = play("chatml", texts, dialogue, max_input_length=3)
    assert not none and (only.turns, only.reward, only.stop_reason) == (0, 0.0, "length")


def test_a_truncated_response_is_kept_whole_in_one_message():
    tokenizer = chatml_tokenizer()
    script = Script(tokenizer, "5", "7<|im_end|>")
    script.stop_reason = "length"
    with sampler(tokenizer, script, dialogue=OneMessageDialogue) as playing:
        sample = asyncio.run(playing.sample(prompt("guess_number"), PARAMS))
    assert tokenizer.decode(sample.token_ids).endswith("assistant\n5higher7<|im_end|>")
    assert sample.loss_mask.sum() == 3


def test_an_answer_of_a_tool_call_alone_adds_no_text_to_the_one_message():
    dialogue = OneMessageDialogue(ChatTemplate(chatml_tokenizer(), {}))
    dialogue.begin([{"role": "user", "content": "guess:"}])
    asked = dialogue.input_ids()
    dialogue.write(Generation([5], [-0.5], "x", "stop", 0))
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    dialogue.answer([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert dialogue.input_ids() == [*asked, 5]


def test_the_keys_choose_the_form():
    chosen = [
        dialogue_class(load_config([*overrides]).generator)
        for overrides in (
            [],
            ["generator.use_conversation_multi_turn=false"],
            ["generator.step_wise_trajectories=true"],
        )
    ]
    assert chosen == [ChatDialogue, OneMessageDialogue, StepWiseDialogue]


def test_saved_groups_keep_the_turns_of_a_conversation_together():
    samples, _, _ = play("qwen3", ["one", "two", "three"], StepWiseDialogue)
    row = prompt("three")
    group = Group(row, (*samples, *samples))
    (restored,) = from_bytes(to_bytes([SavedGroup(group, 0, 0, 0)]), {row.uid: row})
    assert list(map(len, restored.group.conversations)) == [3, 3]
    assert restored.group.rewards == group.rewards == [sum(REWARDS)] * 2
    assert json.dumps(restored.group.samples[2].transcript) == json.dumps(samples[2].transcript)


def test_the_tool_group_of_the_documentation_answers_calls_in_messages_of_tools():
    page = Path(__file__).parents[3] / "docs/environments.md"
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "ToolGroup" in b]
    names: dict[str, object] = {}
    exec(block, names)
    skyrl_gym.register(id="sums", entry_point=names["Sums"])
    try:
        call = '<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": 2}}\n</tool_call>'
        unknown = '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'
        texts, tokenizer = [call, unknown, "It is 5."], realistic_tokenizer("qwen3")
        script = Script(tokenizer, *(text + tokenizer.eos_token for text in texts))
        with sampler(tokenizer, script, max_turns=3, dialogue=StepWiseDialogue) as playing:
            samples = asyncio.run(playing.samples(prompt("sums", "2 + 3", "5"), PARAMS))
    finally:
        skyrl_gym.registry.pop("sums")
    error = "error: Tool 'divide' not found in group 'calculator'."
    messages = [
        {"role": "user", "content": "2 + 3"},
        *chain(*(
            [{"role": "assistant", "content": text}, {"role": "tool", "content": result}]
            for text, result in ((call, "5"), (unknown, error))
        )),
    ]  # fmt: skip
    assert script.inputs[2] == rendered(tokenizer, messages)
    assert [sample.reward for sample in samples] == [0.0, 0.0, 1.0]
